"""Several processes prepare the same rows, and processes of the data that lose their parent."""

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from prepared import good_rows, run, run_rows, write_rows
from rank_server import CONTEXT

from trainer.data.chat import RowEncoder
from trainer.errors import DataError


def _prepare(path: Path, cache: Path, has_locks: bool, results: Any) -> None:
    flock = fcntl.flock

    def limited(descriptor: int, operation: int) -> None:
        if not has_locks and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(cache)):
            raise OSError(errno.ENOLCK, "no locks available")
        flock(descriptor, operation)

    fcntl.flock = limited  # type: ignore[assignment]
    try:
        results.put(run(path, cache=cache).summary.fingerprint)
    except DataError as error:
        results.put(str(error))


def _prepare_in_three_processes(path: Path, cache: Path, *, has_locks: bool = True) -> list[str]:
    results = CONTEXT.Queue()
    arguments = (path, cache, has_locks, results)
    processes = [CONTEXT.Process(target=_prepare, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return outcomes


def _killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _caches(cache: Path) -> list[Path]:
    return [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_that_prepare_at_once_see_the_same(tmp_path, has_locks):
    """Also where the file system of the cache has no locks."""
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(2000))
    cache = tmp_path / "cache"
    outcomes = _prepare_in_three_processes(path, cache, has_locks=has_locks)
    assert len(set(outcomes)) == 1
    assert len(_caches(cache)) == 1


def test_whoever_waited_for_the_lock_does_not_prepare_again(tmp_path, monkeypatch):
    encode = RowEncoder.encode
    num_encodings = []

    def counted(self: RowEncoder, conversations: Any) -> Any:
        num_encodings.append(1)
        return encode(self, conversations)

    monkeypatch.setattr(RowEncoder, "encode", counted)
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(50))
    cache = tmp_path / "cache"
    threads = [threading.Thread(target=run, args=(path,), kwargs={"cache": cache}) for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_encodings == [1]


@pytest.mark.parametrize("has_locks", [True, False])
def test_an_unfinished_cache_of_a_killed_process_is_not_read(tmp_path, monkeypatch, has_locks):
    """Without locks it stays: a container gives its processes the same numbers after each start."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(os, "rename", _killed)
        patch.setattr(Path, "rename", _killed)
        with pytest.raises(KeyboardInterrupt):
            run_rows(tmp_path, *good_rows(3))
    dataset = run_rows(tmp_path, *good_rows(3))
    assert len(dataset) == 3
    assert (_caches(tmp_path / "cache") == [dataset.directory]) == has_locks
