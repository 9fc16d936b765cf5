"""File systems that answer late or twice: what other machines wrote is waited for, a rename
carried out is a rename.
"""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import commit, save, stage

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.retention import Retention

RECORD = FileRecord("shard.pt", 5, "0" * 64)


def test_a_file_that_appears_late_is_waited_for(tmp_path):
    def write_slowly() -> None:
        (tmp_path / "shard.pt").write_bytes(b"ab")
        threading.Event().wait(0.15)
        (tmp_path / "shard.pt").write_bytes(b"abcde")

    writer = threading.Timer(0.15, write_slowly)
    writer.start()
    fsio.await_files(tmp_path, [RECORD], timeout_s=20)
    assert (tmp_path / "shard.pt").stat().st_size == 5
    writer.join()


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "shard.pt: No such file"), (b"abc", "shard.pt has 3 bytes, 5 were written")],
)
def test_a_file_that_never_appears_whole_is_named(tmp_path, content, named):
    if content is not None:
        (tmp_path / "shard.pt").write_bytes(content)
    with pytest.raises(OSError, match=f"what was written is not to be seen here for 0 s: {named}"):
        fsio.await_files(tmp_path, [RECORD], timeout_s=0.2)


def renaming_twice(real: Any, code: int) -> Any:
    """The server carried the rename out, its answer was lost, and the repeated request finds
    nothing to rename.
    """

    def rename(source: Any, target: Any) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code), str(source))

    return rename


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_rename_that_was_carried_out_and_reported_as_failed_counts(tmp_path, monkeypatch, code):
    save(tmp_path, 1)
    staging = stage(tmp_path, 2)
    monkeypatch.setattr(os, "rename", renaming_twice(os.rename, code))
    layout.commit(staging, 2, nonce="a1b2")
    assert layout.inspect(tmp_path / "global_step_2").status == "committed"


def test_another_jobs_checkpoint_of_the_same_step_is_not_mistaken_for_ours(tmp_path, monkeypatch):
    staging = stage(tmp_path, 2)
    real = os.rename

    def lost_race(source: Any, target: Any) -> None:
        fsio.remove_tree(Path(source))
        monkeypatch.setattr(os, "rename", real)
        commit(tmp_path, 2)
        raise OSError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "rename", lost_race)
    with pytest.raises(OSError, match="No such file"):
        layout.commit(staging, 2, nonce="ffff")


def test_a_pointer_that_cannot_be_moved_does_not_undo_the_commit(tmp_path, monkeypatch, caplog):
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    save(tmp_path, 1)
    commit(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(fsio, "atomic_write", full)
        retention.settle(tmp_path, 2, Retention(keep=1))
    assert "is committed, but the pointer" in caplog.text
    assert [info.step for info in choice.select(tmp_path).candidates] == [2, 1], (
        "nothing was deleted"
    )
    retention.settle(tmp_path, 2, Retention(keep=1))
    assert [info.step for info in choice.select(tmp_path).candidates] == [2]


def test_a_directory_that_cannot_be_read_behind_the_commit_does_not_undo_it(
    tmp_path, monkeypatch, caplog
):
    def stale(*args: object, **settings: object) -> set[int]:
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path))

    save(tmp_path, 1)
    commit(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(retention, "worth_keeping", stale)
        retention.settle(tmp_path, 2, Retention(keep=1))
    assert "Stale file handle" in caplog.text and layout.read_pointer(tmp_path).step == 2
