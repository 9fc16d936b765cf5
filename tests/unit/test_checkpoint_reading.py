"""A reader keeps its files even if the checkpoint is deleted. A killed reader leaves nothing
permanently.
"""

import os
import shutil
import signal
import time

import pytest
from checkpoint_fakes import commit, expected_files, files_of, save

from trainer.checkpoint import layout, retention
from trainer.checkpoint.layout import READING_PREFIX
from trainer.checkpoint.reading import pinned
from trainer.errors import CannotWriteError


def inspected(run_dir, step):
    return layout.inspect(run_dir / layout.step_dir_name(step))


def reading(run_dir):
    return list(run_dir.glob(f"{READING_PREFIX}*"))


def test_what_is_read_outlives_its_checkpoint(tmp_path):
    save(tmp_path, 2, 4)
    info = inspected(tmp_path, 2)
    with pinned(info, "huggingface") as directory:
        retention.rotate(tmp_path, keep=1)
        layout.clean_leftovers(tmp_path)
        assert not info.path.exists()
        found = files_of(directory)
    expected = expected_files("global_step_2")
    assert found == {name: expected[name] for name in ("huggingface/config.json", "manifest.json")}
    assert reading(tmp_path) == []
    with pinned(info, "huggingface") as directory:
        assert directory is None
    assert reading(tmp_path) == []


def test_without_links_a_reader_gets_the_checkpoint_itself(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError("no hard links here")

    save(tmp_path, 2)
    monkeypatch.setattr(os, "link", refuse)
    with pinned(inspected(tmp_path, 2), "data.pt") as directory:
        assert directory == tmp_path / "global_step_2"


def test_a_reader_that_cannot_write_links_has_an_exit_code(tmp_path):
    save(tmp_path, 2)
    info = inspected(tmp_path, 2)
    shutil.rmtree(tmp_path)
    with pytest.raises(CannotWriteError, match="reading_global_step_2"), pinned(info):
        pass


def test_another_checkpoint_of_the_same_step_is_not_taken_for_it(tmp_path):
    save(tmp_path, 2)
    info = inspected(tmp_path, 2)
    layout.quarantine(info.path, "damaged")
    manifest = commit(tmp_path, 2) / "manifest.json"
    manifest.write_text("{}")
    with pinned(info, "huggingface") as directory:
        assert directory is None


def test_what_a_killed_reader_left_goes_with_the_next_save_and_what_a_living_one_has_stays(
    tmp_path,
):
    save(tmp_path, 2, 4)
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with pinned(inspected(tmp_path, 2), "huggingface"):
            os.write(writable, b"1")
            time.sleep(60)
        os._exit(1)
    try:
        assert os.read(readable, 1) == b"1"
        layout.clean_leftovers(tmp_path)
        assert len(reading(tmp_path)) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(readable)
        os.close(writable)
    layout.clean_leftovers(tmp_path)
    assert reading(tmp_path) == []
