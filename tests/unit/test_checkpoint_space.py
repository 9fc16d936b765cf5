"""Room on the disk is asked for with numbers, before anything is written."""

import logging

import pytest
from checkpoint_fakes import save

from trainer.checkpoint import fsio, retention
from trainer.checkpoint.retention import Retention

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsio, "free_bytes", lambda path: 10 * GIB)


def test_a_checkpoint_that_does_not_fit_is_refused_with_numbers(free, tmp_path):
    retention.require_space(tmp_path, 9 * GIB)
    with pytest.raises(OSError, match=r"needs 9.8 GiB, and 10 GiB are free: free some space") as e:
        retention.require_space(tmp_path, int(9.8 * GIB))
    assert e.value.filename == str(tmp_path)
    save(tmp_path, 1, 2)
    for keep in (1, 2):
        with pytest.raises(OSError, match="free some space") as e:
            retention.require_space(tmp_path, 10 * GIB, Retention(keep=keep))
        assert ("trainer.max_ckpt_to_keep" in str(e.value)) == (keep > 1)


@pytest.mark.covers("S3.25:C")
def test_a_disk_that_fills_before_rotation_begins_is_warned_of(free, tmp_path, caplog):
    retention.warn_if_tight(tmp_path, 3 * GIB, Retention(keep=2))
    assert caplog.messages == []
    retention.warn_if_tight(tmp_path, 3 * GIB, Retention(keep=3))
    assert (
        "4 more checkpoints of 3 GiB" in caplog.text
        and caplog.records[0].levelno == logging.WARNING
    )
    caplog.clear()
    save(tmp_path, 1, 2)
    retention.warn_if_tight(tmp_path, 3 * GIB, Retention(keep=3))
    retention.warn_if_tight(tmp_path, 3 * GIB, Retention())
    assert caplog.messages == [], "what is already there needs no more room"
