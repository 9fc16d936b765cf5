"""One run per directory: the second is refused, a killed one leaves nothing behind."""

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.checkpoint.lock import LOCK, RunLock
from trainer.config import ConfigError
from trainer.protocols import CannotWriteError


def start_holder(run_dir: Path, *, with_worker: bool = False) -> tuple[int, int | None]:
    """A process that takes the lock and sleeps; returns its pid and that of its forked worker."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        RunLock(run_dir).acquire(timeout_s=0)
        worker = os.fork() if with_worker else None
        if worker != 0:
            os.write(writer, str(worker or 0).encode())
        time.sleep(60)
        os._exit(1)
    os.close(writer)
    worker = int(os.read(reader, 20))
    os.close(reader)
    return pid, worker or None


@pytest.fixture
def children() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_a_second_run_is_refused_and_told_who_holds(tmp_path: Path, children: list[int]) -> None:
    pid, _ = start_holder(tmp_path)
    children.append(pid)
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"pid {pid} on {socket.gethostname()}.*trainer.default_local_dir"):
        RunLock(tmp_path).acquire(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - start_s < 5


@pytest.mark.parametrize("with_worker", [False, True], ids=["alone", "worker survives"])
def test_kill_9_releases_it(tmp_path: Path, children: list[int], with_worker: bool) -> None:
    pid, worker = start_holder(tmp_path, with_worker=with_worker)
    children += [worker] if worker else []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lock = RunLock(tmp_path)
    lock.acquire(timeout_s=0)
    assert lock.is_held() and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    if worker:
        os.kill(worker, 0)  # still alive
    lock.release()


def test_it_waits_for_a_run_that_is_ending(tmp_path: Path, children: list[int]) -> None:
    pid, _ = start_holder(tmp_path)
    killer = os.fork()
    if killer == 0:
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    with RunLock(tmp_path):
        pass
    os.waitpid(killer, 0)
    os.waitpid(pid, 0)


def test_a_forked_child_neither_keeps_nor_breaks_it(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(int(lock.is_held()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.is_held()
        with pytest.raises(ConfigError, match="in use"):
            RunLock(tmp_path).acquire(timeout_s=0)
    assert not lock.is_held()
    RunLock(tmp_path).acquire(timeout_s=0)


def test_a_removed_lock_file_is_noticed(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first:
        (tmp_path / LOCK).unlink()
        assert not first.is_held()
        with RunLock(tmp_path) as second:
            assert second.is_held() and not first.is_held()


def test_a_lock_on_a_file_removed_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, calls = fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with RunLock(tmp_path) as lock:
        assert lock.is_held() and len(calls) == 2


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError, match=r"cannot lock the run directory.*missing"):
        RunLock(tmp_path / "missing").acquire(timeout_s=0)
