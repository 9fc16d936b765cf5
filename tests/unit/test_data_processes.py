"""Several processes prepare the same rows; data processes lose their parent."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from prepared import good_rows, run, run_rows
from rank_server import CONTEXT
from small_files import write_lines

from trainer.data import token_cache


def _no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks available")


def _prepare(path, cache, has_locks, results):
    """Put the fingerprint of the rows, and whether this process prepared them."""
    if not has_locks:
        fcntl.flock = _no_locks
    with patch.object(token_cache, "write_samples", wraps=token_cache.write_samples) as written:
        fingerprint = run(path, cache=cache).summary.fingerprint
    results.put((fingerprint, written.called))


def _caches(cache):
    return [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_that_prepare_at_once_see_the_same(tmp_path, has_locks):
    """With locks, one process prepares, and the others wait."""
    path = write_lines(tmp_path / "rows.jsonl", good_rows(2000))
    cache = tmp_path / "cache"
    results = CONTEXT.Queue()
    arguments = (path, cache, has_locks, results)
    processes = [CONTEXT.Process(target=_prepare, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    fingerprints, have_prepared = zip(*(results.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(set(fingerprints)) == len(_caches(cache)) == 1
    assert sum(have_prepared) == 1 or not has_locks


def _killed(*_, **__):
    raise KeyboardInterrupt


def test_an_unfinished_cache_of_a_killed_process_is_not_read(tmp_path, monkeypatch):
    """Without locks it stays: a container gives its processes the same numbers after each start."""
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(os, "rename", _killed)
        killed.setattr(Path, "rename", _killed)
        with pytest.raises(KeyboardInterrupt):
            run_rows(tmp_path, *good_rows(3))
    dataset = run_rows(tmp_path, *good_rows(3))
    assert len(dataset) == 3 and len(_caches(tmp_path / "cache")) == 2
