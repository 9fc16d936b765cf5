"""One run per directory: a second run is refused, a killed run leaves no lock, and a run that lost
the lock notices it.
"""

import errno
import fcntl
import os
import shutil
import signal
import socket
import time
from contextlib import suppress

import pytest
from small_files import change_json, read_json, write_json

from trainer.checkpoint.lock import LOCK, RunLock
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime import heartbeat


def take(directory):
    RunLock(directory).acquire(timeout_s=0)


@pytest.fixture
def holder(tmp_path):
    """A process that takes the lock and sleeps. Returns its pid and the pid of its forked worker."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        take(tmp_path)
        if os.fork() == 0:  # the worker has let go of the lock by now
            os.write(writer, str(os.getpid()).encode())
        time.sleep(60)
        os._exit(1)
    os.close(writer)
    worker = int(os.read(reader, 20))
    os.close(reader)
    yield pid, worker
    for left in (pid, worker):
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(left, signal.SIGKILL)
            os.waitpid(left, 0)


def test_a_second_run_is_refused_and_told_who_holds(tmp_path, holder):
    pid, _ = holder
    os.kill(pid, signal.SIGSTOP)
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"pid {pid} on {socket.gethostname()}"):
        RunLock(tmp_path).acquire(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - start_s < 5


def test_kill_9_releases_it_although_a_worker_survives(tmp_path, holder):
    pid, worker = holder
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lock = RunLock(tmp_path)
    lock.acquire(timeout_s=0)
    assert lock.is_held() and read_json(tmp_path / LOCK)["pid"] == os.getpid()
    os.kill(worker, 0)  # still alive
    lock.release()


def test_a_forked_child_neither_keeps_nor_breaks_it(tmp_path):
    with RunLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(int(lock.is_held()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.is_held()
        with pytest.raises(ConfigError, match="in use"):
            take(tmp_path)
    assert not lock.is_held()
    take(tmp_path)


def test_a_lock_file_that_was_removed_is_made_again_unless_another_run_came(tmp_path, caplog):
    with RunLock(tmp_path) as first:
        (tmp_path / LOCK).unlink()
        first.require()
        first.require()
        assert first.is_held() and caplog.text.count("was removed during training") == 1
        with pytest.raises(ConfigError, match=f"in use by another run .pid {os.getpid()} "):
            take(tmp_path)
        (tmp_path / LOCK).unlink()
        with (
            RunLock(tmp_path),
            pytest.raises(CannotWriteError, match="another run has taken it over"),
        ):
            first.require()
        with pytest.raises(CannotWriteError, match="another run has taken it over"):
            first.require()


def test_a_run_whose_directory_was_deleted_may_not_go_on(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with RunLock(run_dir) as lock:
        shutil.rmtree(run_dir)
        with pytest.raises(CannotWriteError, match=f"{run_dir} was deleted"):
            lock.require()


@pytest.mark.parametrize("fault", ["copied over", "nonce overwritten", "emptied", "a link"])
def test_a_fenced_run_does_not_hold_it(tmp_path, fault):
    path = tmp_path / LOCK
    copy = tmp_path / "copy"
    with RunLock(tmp_path) as lock:
        shutil.copy(path, copy)
        if fault == "copied over":
            os.replace(copy, path)
        elif fault == "nonce overwritten":
            change_json(path, nonce="0" * 32)
        elif fault == "emptied":
            path.write_bytes(b"")
        else:
            path.unlink()
            path.symlink_to(copy)
        assert not lock.is_held()
        assert not lock.is_held(), "asking again changes nothing"


def test_a_file_system_that_does_not_answer_is_not_held(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with RunLock(tmp_path) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "_look", fail)
            assert not lock.is_held()
        assert lock.is_held()
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(CannotWriteError, match=r"\.train\.lock: Input/output error"):
        take(tmp_path)


def test_a_process_that_was_given_the_pid_of_a_killed_run_is_not_that_run(tmp_path):
    """This happens after a container restarts: `doctor` and `Tracking` refused the directory, and
    `evaluate --watch` waited.
    """
    with RunLock(tmp_path):
        assert heartbeat.is_live(tmp_path) and heartbeat.trainer_pid(tmp_path) == os.getpid()
        left = read_json(tmp_path / LOCK)
    write_json(tmp_path / LOCK, left | {"pid": 1})
    assert not heartbeat.is_live(tmp_path) and heartbeat.trainer_pid(tmp_path) is None


def test_a_lock_on_a_file_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    flock = fcntl.flock
    calls = []

    def remove_first(descriptor, operation):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with RunLock(tmp_path) as lock:
        assert lock.is_held() and len(calls) == 2


def test_a_file_system_without_locks_is_refused_unless_it_is_accepted(
    tmp_path, monkeypatch, caplog
):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        ConfigError, match=r"(?s)without locks.*trainer\.checkpoint\.require_lock=false"
    ):
        take(tmp_path)
    first = RunLock(tmp_path, needs_flock=False)
    second = RunLock(tmp_path, needs_flock=False)
    first.acquire(timeout_s=0)
    assert first.is_held() and "has no locks" in caplog.text
    (tmp_path / LOCK).unlink()
    first.require()  # only the lock file was removed
    second.acquire(timeout_s=0)
    assert second.is_held() and f"taking over from another run (pid {os.getpid()}" in caplog.text
    with pytest.raises(CannotWriteError, match="another run has taken it over"):
        first.require()
    first.release()
    assert second.is_held()
    second.release()
    assert (tmp_path / LOCK).read_bytes() == b""
