"""Stop signals and exit codes of one rank, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.errors import (
    EXIT_BAD_DATA,
    EXIT_CRASH,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EXIT_USAGE,
)
from trainer.runtime.status import VARIABLE, Status, new_status

PRELUDE = """
import os, signal, sys, time
from trainer.runtime import signals
from trainer.runtime.signals import StopRequest, report_exit_code, leave
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.status import launcher_status
stop = StopRequest()
stop.install()
def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()
def send(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.05)
"""


@pytest.fixture
def status() -> Iterator[Status]:
    with new_status(4) as made:
        yield made


def run(program: str, *, status: Status | None = None) -> subprocess.CompletedProcess[str]:
    repository = Path(__file__).resolve().parents[2]
    env = {
        name: value for name, value in os.environ.items() if name not in (VARIABLE, "LOCAL_RANK")
    }
    env |= {"PYTHONPATH": str(repository)} | ({VARIABLE: status.address} if status else {})
    command = [sys.executable, "-c", PRELUDE + program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_outside_of_the_loop_a_signal_leaves_at_once(name, status):
    done = run(f"send('{name}'); print('still here')", status=status)
    assert done.returncode == EXIT_RESUMABLE
    assert done.stdout == ""
    assert (
        done.stderr == f"stopped by {name}; the same command continues from the last checkpoint\n"
    )
    assert status.exit_code() == EXIT_RESUMABLE


def test_a_rank_that_is_ended_after_another_failed_says_nothing_of_its_own(status):
    """Beside an error of the user's data "stopped by SIGTERM" would look like the cause."""
    status.report(65)
    done = run("send('SIGTERM')", status=status)
    assert (done.returncode, done.stderr, status.exit_code()) == (EXIT_RESUMABLE, "", 65)


def test_a_signal_leaves_at_once_while_the_main_thread_waits_inside_c_code(status):
    """As it does for ranks that have not come yet: Python runs no handler there."""
    program = """
import ctypes, threading
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
threading.Timer(0.2, send, ["SIGTERM"]).start()
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
    done = run(program, status=status)
    assert (done.returncode, status.exit_code()) == (EXIT_RESUMABLE, 75)
    assert (
        done.stderr == "stopped by SIGTERM; the same command continues from the last checkpoint\n"
    )


def test_another_signal_with_a_handler_asks_for_nothing():
    """torch handles SIGCHLD, by which it hears of loader workers."""
    program = """
signal.signal(signal.SIGCHLD, lambda *_: None)
if os.fork() == 0:
    os._exit(0)
time.sleep(2 * signals.HANDLED_WITHIN_S)
print("still here")
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still here\n", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_inside_of_the_loop_a_signal_only_sets_the_flag(name, status):
    program = f"""
assert not stop.is_set and stop.signal_name is None
with stop.deferred():
    send('{name}')
    print(stop.is_set, stop.signal_name)
"""
    done = run(program, status=status)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"True {name}\n", "")
    assert status.exit_code() is None and status.beats() == {}


def test_copies_of_a_signal_are_one_request():
    program = """
with stop.deferred():
    for name in ('SIGTERM', 'SIGTERM', 'SIGINT', 'SIGUSR1'):
        send(name)
    print(stop.signal_name)
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), (
        "schedulers and terminals deliver copies"
    )


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_a_second_signal_later_leaves_at_once(second):
    program = f"""
with stop.deferred():
    send('SIGTERM')
    stop._first_at -= signals.REPEAT_S + 0.1
    print('saving', flush=True)
    send('{second}')
    print('still here', flush=True)
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (EXIT_RESUMABLE, "saving\n")
    assert f"stopped by {second}" in done.stderr


def test_the_flag_does_not_outlive_its_loop_silently():
    """After the loop a later signal leaves at once again."""
    program = """
with stop.deferred():
    pass
send('SIGTERM')
print('still here')
"""
    assert run(program).returncode == EXIT_RESUMABLE


def test_the_first_reported_exit_code_stays(status):
    done = run("report_exit_code(65); report_exit_code(1); report_exit_code(0)", status=status)
    assert done.returncode == 0, done.stderr
    assert status.exit_code() == 65


def test_reporting_needs_no_launcher_and_survives_a_launcher_that_is_gone():
    assert run("report_exit_code(1)").returncode == 0
    assert run("report_exit_code(1)", status=Status("/proc/self/fd/999")).returncode == 0


@pytest.mark.parametrize(
    "code", [EXIT_DONE, EXIT_CRASH, EXIT_USAGE, EXIT_BAD_DATA, EXIT_RESUMABLE, EXIT_DIVERGED]
)
def test_leaving_without_a_launcher_keeps_the_code(code):
    assert run(f"leave({code})").returncode == code


@pytest.mark.parametrize(
    ("code", "seen_by_torchrun"),
    [(EXIT_DONE, 0), (EXIT_RESUMABLE, 0), (EXIT_CRASH, 1), (EXIT_DIVERGED, 76)],
)
def test_under_the_launcher_an_orderly_end_is_no_crash(code, seen_by_torchrun, status):
    done = run(f"print('last words'); leave({code})", status=status)
    assert done.returncode == seen_by_torchrun
    assert done.stdout == "last words\n"
    assert status.exit_code() == code


def test_a_rank_dies_with_its_parent(status):
    program = """
child = os.fork()
if child == 0:
    signals.join_launcher()
    Heartbeat()
    time.sleep(60)
    os._exit(0)
assert wait_for(lambda: launcher_status().beats())
print(child, flush=True)
os._exit(0)
"""
    started = time.monotonic()
    done = run(program, status=status)
    pid = int(done.stdout)
    while (
        Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    ):
        assert time.monotonic() - started < 30, "the rank outlived its parent"
        time.sleep(0.05)
