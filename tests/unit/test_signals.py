"""Stop signals and exit codes of one rank, each in a separate process."""

import os

import pytest
from processes import run_python, wait_until
from repository import REPOSITORY

from trainer.errors import EXIT_BAD_DATA, EXIT_CRASH, EXIT_DIVERGED, EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.processes import is_alive
from trainer.runtime.status import VARIABLE, new_status

STOPPED = "stopped by {}; run the same command to continue from the last checkpoint\n"
PRELUDE = """
import os, signal, time
from trainer.runtime import signals
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest, leave, report_exit_code
stop = StopRequest()
stop.install()
def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.05)
"""


@pytest.fixture
def status():
    with new_status(4) as made:
        yield made


def run(program, *, status=None):
    """Return exit code, output and errors."""
    own = {VARIABLE, "LOCAL_RANK"}
    env = {name: value for name, value in os.environ.items() if name not in own}
    env["PYTHONPATH"] = str(REPOSITORY)
    if status is not None:
        env[VARIABLE] = status.address
    done = run_python("-c", PRELUDE + program, env=env)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_leaves_at_once_outside_of_the_loop_and_sets_a_flag_inside(name, status):
    program = f"""
with stop.deferred():
    send('{name}', '{name}', 'SIGINT')  # schedulers and terminals deliver copies
    print(stop.is_set, stop.signal_name)
"""
    assert run(program, status=status) == (0, f"True {name}\n", "")
    assert status.exit_code() is None
    stopped = (75, "", STOPPED.format(name))
    assert run(f"send('{name}'); print('still here')", status=status) == stopped
    assert status.exit_code() == EXIT_RESUMABLE


LEAVES = {
    "a second signal, later": """
with stop.deferred():
    send('SIGINT')
    stop._first_at -= signals.REPEAT_S + 0.1
    send('SIGTERM')
    print('still here')
""",
    "after the loop": "with stop.deferred(): pass\nsend('SIGTERM'); print('still here')",
    "the main thread waits inside C code, as for ranks that have not come": """
import ctypes, threading
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
threading.Timer(0.2, send, ["SIGTERM"]).start()
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
""",
}


@pytest.mark.parametrize("case", LEAVES)
def test_a_signal_leaves_at_once(case, status):
    assert run(LEAVES[case], status=status) == (75, "", STOPPED.format("SIGTERM"))


def test_a_rank_that_is_ended_after_another_failed_says_nothing_of_its_own(status):
    """Next to an error in the user's data, "stopped by SIGTERM" would look like the cause."""
    status.report(65)
    assert run("send('SIGTERM')", status=status) == (EXIT_RESUMABLE, "", "")
    assert status.exit_code() == 65


def test_another_signal_with_a_handler_asks_for_nothing():
    """torch handles SIGCHLD to learn that loader workers have ended."""
    program = """
signal.signal(signal.SIGCHLD, lambda *_: None)
if os.fork() == 0:
    os._exit(0)
time.sleep(2 * signals.HANDLED_WITHIN_S)
print("still here")
"""
    assert run(program) == (0, "still here\n", "")


def test_the_first_reported_exit_code_stays(status):
    program = "report_exit_code(65); report_exit_code(1); report_exit_code(0)"
    assert run(program, status=status) == (0, "", "") and status.exit_code() == 65


CODES = [EXIT_DONE, EXIT_CRASH, EXIT_BAD_DATA, EXIT_RESUMABLE, EXIT_DIVERGED]


@pytest.mark.parametrize("code", CODES)
def test_under_the_launcher_an_orderly_end_is_no_crash_for_torchrun(code, status):
    assert run(f"leave({code})")[0] == code
    agent_code = 0 if code == EXIT_RESUMABLE else code
    program = f"print('last words'); leave({code})"
    assert run(program, status=status)[:2] == (agent_code, "last words\n")
    assert status.exit_code() == code


def test_a_rank_dies_with_its_parent(status):
    program = """
child = os.fork()
if child == 0:
    signals.join_launcher()
    Heartbeat()
    time.sleep(60)
while not signals.launcher_status().beats():
    time.sleep(0.01)
print(child, flush=True)
os._exit(0)
"""
    pid = int(run(program, status=status)[1])
    assert wait_until(lambda: not is_alive(pid)), "the rank outlived its parent"
