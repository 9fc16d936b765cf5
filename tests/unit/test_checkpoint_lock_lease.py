"""Where the file system has no flock: a renewed lease is respected, a dead one taken over, whatever the clocks say."""

import errno
import fcntl
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_checkpoint_lock import count_winners

from trainer.checkpoint.lock import LOCK, RunLock
from trainer.config import ConfigError
from trainer.runtime.files import NO_FLOCK

DEAD = json.dumps({"nonce": "d" * 32, "pid": 4711, "host": "gone", "started": "1999", "renewed": "000000000007"})
OBSERVE_S = 0.8


def refuse_flock(error_number: int = errno.ENOLCK) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(error_number, os.strerror(error_number))

    return flock


@pytest.fixture(autouse=True)
def _without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock())


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[Callable[..., RunLock]]:
    """Makes locks of one run directory with short intervals; gives them back at the end."""
    made: list[RunLock] = []

    def make(observe_s: float = OBSERVE_S) -> RunLock:
        made.append(RunLock(tmp_path, renew_s=0.05, observe_s=observe_s, settle_s=0.1))
        return made[-1]

    yield make
    for lock in made:
        lock.release()
    assert [thread for thread in threading.enumerate() if thread.name == "lease"] == []


@contextmanager
def holder(lock: RunLock, *, with_worker: bool = False) -> Iterator[tuple[int, int]]:
    """A process that holds the lease until it is killed, and its forked worker; SIGUSR1: it exits with `is_held`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(int(lock.is_held())))
            lock.acquire(timeout_s=0)
            is_last = not with_worker or os.fork() == 0
            if is_last:
                os.write(writer, str(os.getpid()).encode())
            time.sleep(60)
        finally:
            os._exit(2)
    os.close(writer)
    worker = int(os.read(reader, 20))
    os.close(reader)
    try:
        yield pid, worker
    finally:
        for child in [pid, *([worker] if with_worker else [])]:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def seconds_to_acquire(lock: RunLock, *, timeout_s: float = 0) -> float:
    start_s = time.monotonic()
    lock.acquire(timeout_s=timeout_s)
    assert lock.is_held()
    return time.monotonic() - start_s


@pytest.mark.parametrize("error_number", NO_FLOCK, ids=errno.errorcode.get)
def test_a_live_lease_is_respected(
    locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock(error_number))
    first = locks()
    first.acquire(timeout_s=0)
    with pytest.raises(ConfigError, match=f"pid {os.getpid()} on .*trainer.default_local_dir"):
        locks().acquire(timeout_s=0)
    assert first.is_held()


def test_a_lease_renewed_seldom_never_looks_dead(tmp_path: Path, locks: Callable[..., RunLock]) -> None:
    with RunLock(tmp_path, renew_s=0.25, observe_s=OBSERVE_S, settle_s=0.0) as first:
        with pytest.raises(ConfigError, match="in use"):
            locks().acquire(timeout_s=3 * OBSERVE_S)
        assert first.is_held()


def test_a_dead_lease_is_taken_over_and_leaves_nothing_else(tmp_path: Path, locks: Callable[..., RunLock]) -> None:
    (tmp_path / LOCK).write_text(DEAD)
    lock = locks()
    assert seconds_to_acquire(lock) >= OBSERVE_S
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{}", DEAD[:40].encode(), bytes(100)], ids=["", "{}", "cut", "zeros"])
def test_no_content_blocks_the_directory(tmp_path: Path, locks: Callable[..., RunLock], content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    waited_s = seconds_to_acquire(locks(OBSERVE_S if content else 30))
    assert waited_s >= OBSERVE_S if content else waited_s < 15


def test_after_a_clean_release_nobody_waits(tmp_path: Path, locks: Callable[..., RunLock]) -> None:
    lock = locks(30)
    for _ in range(2):
        assert seconds_to_acquire(lock) < 15
        lock.release()
        assert not lock.is_held() and (tmp_path / LOCK).read_bytes() == b""


def test_a_release_while_it_is_observed_is_noticed(tmp_path: Path, locks: Callable[..., RunLock]) -> None:
    (tmp_path / LOCK).write_text(DEAD)
    threading.Timer(0.2, (tmp_path / LOCK).write_bytes, [b""]).start()
    assert seconds_to_acquire(locks(30)) < 15


def test_it_waits_for_a_run_that_is_ending(locks: Callable[..., RunLock]) -> None:
    first, second = locks(), locks()
    first.acquire()
    threading.Timer(1.5 * OBSERVE_S, first.release).start()
    assert 1.4 * OBSERVE_S < seconds_to_acquire(second, timeout_s=30) < 10


def test_the_lease_outlives_a_renewal_that_fails(
    locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, num_renewals: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    first = locks()
    first.acquire(timeout_s=0)
    with monkeypatch.context() as patch:
        patch.setattr(first, "_write_record", fail)
        time.sleep(0.2)
    with pytest.raises(ConfigError, match="in use"):
        locks().acquire(timeout_s=0)
    assert first.is_held()


@pytest.mark.parametrize("with_worker", [False, True], ids=["alone", "worker survives"])
def test_a_killed_holder_is_taken_over(locks: Callable[..., RunLock], with_worker: bool) -> None:
    with holder(locks(), with_worker=with_worker) as (pid, worker):
        with pytest.raises(ConfigError, match=f"pid {pid} "):
            locks().acquire(timeout_s=0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if with_worker:
            os.kill(worker, 0)  # still alive
        assert seconds_to_acquire(locks()) >= 0.9 * OBSERVE_S


def test_a_stopped_holder_is_fenced_and_stays_so(tmp_path: Path, locks: Callable[..., RunLock]) -> None:
    with holder(locks()) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        lock = locks()
        seconds_to_acquire(lock)
        nonce = json.loads((tmp_path / LOCK).read_text())["nonce"]
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)  # several renewals, if it still made any
        assert lock.is_held() and json.loads((tmp_path / LOCK).read_text())["nonce"] == nonce
        os.kill(pid, signal.SIGUSR1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the fenced run believes that it holds it"
        assert lock.is_held()


@pytest.mark.parametrize("fault", ["replaced", "nonce overwritten", "removed"])
def test_a_fenced_holder_stops_renewing(tmp_path: Path, fault: str) -> None:
    lock, path = RunLock(tmp_path, renew_s=0.2, observe_s=OBSERVE_S, settle_s=0.0), tmp_path / LOCK
    lock.acquire()
    if fault == "replaced":
        (tmp_path / "new").write_text(DEAD)
        os.replace(tmp_path / "new", path)
    elif fault == "nonce overwritten":
        path.write_text(DEAD)
    else:
        path.unlink()
    assert not lock.is_held()
    assert lock._renewer is not None
    lock._renewer.join(30)
    assert not lock._renewer.is_alive()
    lock.release()
    assert not path.exists() if fault == "removed" else path.read_text() == DEAD


def test_a_renewal_under_way_during_the_takeover_does_not_undo_it(
    locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = locks(), locks()
    first.acquire()
    is_stopped, may_go_on, write_record = threading.Event(), threading.Event(), first._write_record

    def stop_before_writing(*, num_renewals: int) -> None:
        is_stopped.set()
        may_go_on.wait(30)
        write_record(num_renewals=num_renewals)

    monkeypatch.setattr(first, "_write_record", stop_before_writing)
    assert is_stopped.wait(10)
    seconds_to_acquire(second)
    may_go_on.set()
    time.sleep(0.2)
    assert second.is_held() and not first.is_held()


@pytest.mark.parametrize("seed", [0, 1])
def test_clocks_and_modification_times_do_not_matter(
    tmp_path: Path, locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw, stop = random.Random(seed), threading.Event()

    def disturb() -> None:
        while not stop.wait(0.01):
            jump_s = draw.choice([0, 1, 2**31, draw.randrange(2**32)])
            os.utime(tmp_path / LOCK, (jump_s, jump_s))

    monkeypatch.setattr(time, "time", lambda: draw.uniform(0, 2**32))
    (tmp_path / LOCK).write_text(DEAD)
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        first = locks()
        waited_s = seconds_to_acquire(first)
        assert OBSERVE_S <= waited_s < OBSERVE_S + 10, f"a dead lease looks alive, {seed=}"
        with pytest.raises(ConfigError, match="in use"):
            locks().acquire(timeout_s=OBSERVE_S)
        assert first.is_held()
    finally:
        stop.set()
        disturber.join()


def test_a_machine_with_flock_respects_the_lease_of_one_without(
    tmp_path: Path, locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = locks(), locks()
    first.acquire()
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    with pytest.raises(ConfigError, match="in use"):
        second.acquire(timeout_s=0)
    assert first.is_held()
    (tmp_path / LOCK).write_text(DEAD)
    assert seconds_to_acquire(second) >= OBSERVE_S
    assert not first.is_held()


def test_a_forked_child_neither_keeps_nor_ends_it(locks: Callable[..., RunLock]) -> None:
    lock = locks()
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(int(lock.is_held()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.is_held()
    with pytest.raises(ConfigError, match="in use"):
        locks().acquire(timeout_s=0)


@pytest.mark.parametrize(("num_rounds", "dead"), [(8, b""), (3, DEAD.encode())], ids=["free", "dead lease"])
def test_of_runs_that_start_together_exactly_one_wins(tmp_path: Path, num_rounds: int, dead: bytes) -> None:
    lock = RunLock(tmp_path, renew_s=0.05, observe_s=OBSERVE_S, settle_s=0.6)
    wins = count_winners(lock, num_rounds=num_rounds, num_processes=3, timeout_s=60, dead=dead)
    assert wins == [1] * num_rounds


def test_two_that_both_found_it_free_do_not_both_win(
    locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_looked, replace, results = threading.Barrier(2), os.replace, []

    def replace_together(source: Path, target: Path) -> None:
        if both_looked.wait(10) == 1:
            time.sleep(0.02)
        replace(source, target)

    def contend(lock: RunLock) -> None:
        try:
            lock.acquire(timeout_s=0)
            results.append("won")
        except ConfigError:
            results.append("refused")

    monkeypatch.setattr(os, "replace", replace_together)
    threads = [threading.Thread(target=contend, args=(locks(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused", "won"]


def test_one_that_looked_before_another_took_over_leaves_it(
    tmp_path: Path, locks: Callable[..., RunLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = locks(), locks()
    write_record = late._write_record

    def let_first_in(*, num_renewals: int) -> None:
        write_record(num_renewals=num_renewals)
        if not first.is_held():
            first.acquire()

    (tmp_path / LOCK).write_text(DEAD)
    monkeypatch.setattr(late, "_write_record", let_first_in)
    with pytest.raises(ConfigError, match="in use"):
        late.acquire(timeout_s=0)
    assert first.is_held()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_intervals_under_which_a_live_lease_looks_dead_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"observe_s=3\.0"):
        RunLock(tmp_path, renew_s=1.0, observe_s=3.0, settle_s=0.5)
