"""Room on the disk is asked for with numbers, before anything is written."""

import logging
from pathlib import Path

import pytest
from checkpoint_fakes import save

from trainer.checkpoint import fsio, retention
from trainer.checkpoint.retention import Retention
from trainer.runtime.text import readable

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsio, "free_bytes", lambda path: 10 * GIB)


def test_a_checkpoint_that_does_not_fit_is_refused_with_numbers(free: None, tmp_path: Path) -> None:
    retention.require_space(tmp_path, 9 * GIB)
    with pytest.raises(
        OSError, match=r"needs 9.8 GiB, and 10 GiB are free: free some space"
    ) as caught:
        retention.require_space(tmp_path, int(9.8 * GIB))
    assert caught.value.filename == str(tmp_path)
    save(tmp_path, 1, 2)
    with pytest.raises(
        OSError, match=r"or keep fewer than the 2 here: lower trainer.max_ckpt_to_keep"
    ):
        retention.require_space(tmp_path, int(9.8 * GIB))


def test_what_is_at_its_lowest_is_not_advised(
    free: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `max_ckpt_to_keep=1` the best checkpoint stays too; the advice was to lower that."""
    save(tmp_path, 1, 2)
    for kept, way in (
        (Retention(keep=2), ", or keep fewer than the 2 here: lower trainer.max_ckpt_to_keep"),
        (Retention(keep=1), ""),
    ):
        with pytest.raises(OSError, match=f"are free: free some space{way}: '"):
            retention.require_space(tmp_path, 10 * GIB, kept)
    retention.warn_if_tight(tmp_path / "new", 9 * GIB, Retention(keep=1))
    assert caplog.messages[0].endswith("free some space")


@pytest.mark.covers("S3.25:C")
def test_a_disk_that_fills_before_rotation_begins_is_warned_of(
    free: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_free_space_is_that_of_the_file_system(tmp_path: Path) -> None:
    assert 0 < fsio.free_bytes(tmp_path) < 2**60


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.46 KiB"),
        (54 * 2**20, "54 MiB"),
        (999.6 * 1024, "0.976 MiB"),
        (2**44, "16 TiB"),
    ],
)
def test_sizes_are_readable(size_bytes: int, text: str) -> None:
    assert readable(size_bytes) == text
