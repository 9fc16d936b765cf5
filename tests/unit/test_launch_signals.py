"""Processes of the launcher: signals on their way to the ranks, exit codes on theirs, nothing
left behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import wait_until

from trainer.launch.ranks import NodeLayout, rank_environment
from trainer.runtime.processes import is_alive
from trainer.runtime.status import Status

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, sys
from pathlib import Path
from trainer.launch.supervise import supervise
from trainer.launch.watchdog import Watchdog
from trainer.runtime.status import new_status
with new_status(2) as status:
    env = {**os.environ, "SFT_STATUS": status.address}
    watchdog = Watchdog(status, run_dir=Path(env["SCRATCH"], "run"), has_peers=False)
    sys.exit(supervise([sys.executable, *sys.argv[1:]], env=env, status=status, watchdog=watchdog))
"""
# Stands for torchrun: starts two ranks, waits for them and folds their exit codes into 0 or 1.
AGENT = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(rank)]) for rank in range(2)]
sys.exit(any([rank.wait() for rank in ranks]))
"""
SLEEPING_AGENT = """
import os, time
open(os.path.join(os.environ["SCRATCH"], "agent"), "w").write(str(os.getpid()))
time.sleep(60)
"""
# Stands for a rank: notes every signal, and half a second after the first, or when it need not stay
# any more, leaves in order with 75.
RANK = """
import os, signal, sys, time
from trainer.runtime.status import Beat, launcher_status, write_beat
status, scratch, rank = launcher_status(), os.environ["SCRATCH"], sys.argv[1]
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
write_beat(status.open_rank(int(rank)), Beat(os.getpid(), 1.0, float("inf"), "train"))
open(os.path.join(scratch, f"rank_{rank}.pid"), "w").write(str(os.getpid()))
while not received:
    time.sleep(0.01)
while os.path.exists(os.path.join(scratch, "stay")):
    open(os.path.join(scratch, f"received_{rank}"), "w").write(" ".join(received))
    time.sleep(0.01)
time.sleep(0.5)
open(os.path.join(scratch, f"received_{rank}"), "w").write(" ".join(received))
status.report(75)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Starts `supervise` on an agent script in a process group of its own, with
    `tmp_path/scratch` for the ranks.
    """
    (tmp_path / "scratch").mkdir()
    (tmp_path / "rank.py").write_text(RANK)

    def run(agent: str, *before: str) -> subprocess.Popen:
        (tmp_path / "agent.py").write_text(agent)
        programs = (tmp_path / "agent.py", tmp_path / "rank.py")
        return subprocess.Popen(
            [*before, sys.executable, "-c", LAUNCHER, *programs],
            env={**os.environ, "PYTHONPATH": str(ROOT), "SCRATCH": str(tmp_path / "scratch")},
            start_new_session=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    return run


def read_pid(path: Path) -> int:
    assert wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def wait_for_ranks(scratch: Path) -> None:
    for rank in range(2):
        read_pid(scratch / f"rank_{rank}.pid")


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 1),
        (
            "import os; from trainer.runtime.status import *; launcher_status().report(65); "
            "os._exit(1)",
            65,
        ),
        ("from trainer.runtime.status import *; launcher_status().report(75)", 75),
    ],
)
def test_exit_code_of_an_agent(agent, code, start):
    assert start(agent).wait(timeout=20) == code


def test_a_killed_agent_is_named(start):
    launcher = start("import os; os.kill(os.getpid(), 9)")
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert "the ranks were killed by SIGKILL (likely out of host memory)" in stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_reaches_every_rank_once(name, start, tmp_path):
    launcher, scratch = start(AGENT), tmp_path / "scratch"
    wait_for_ranks(scratch)
    os.killpg(launcher.pid, signal.Signals[name])  # as a terminal does: the whole process group
    assert launcher.wait(timeout=20) == 75
    assert [(scratch / f"received_{rank}").read_text() for rank in range(2)] == [name, name]


@pytest.mark.parametrize(("is_asked", "code"), [(True, 75), (False, 1)])
def test_a_rank_lost_beside_an_orderly_stop_is_a_crash_unless_a_signal_asked_for_the_stop(
    is_asked, code, start, tmp_path
):
    (tmp_path / "rank.py").write_text(RANK + "sys.exit(1)\n")
    launcher, scratch = start(AGENT), tmp_path / "scratch"
    wait_for_ranks(scratch)
    for pid in (
        [launcher.pid]
        if is_asked
        else [read_pid(scratch / f"rank_{rank}.pid") for rank in range(2)]
    ):
        os.kill(pid, signal.SIGTERM)
    assert launcher.wait(timeout=20) == code


def test_a_second_signal_is_passed_on(start, tmp_path):
    launcher, scratch = start(AGENT), tmp_path / "scratch"
    (scratch / "stay").touch()
    wait_for_ranks(scratch)
    launcher.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: all((scratch / f"received_{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGTERM)
    assert wait_until(
        lambda: all("SIGTERM" in (scratch / f"received_{rank}").read_text() for rank in range(2))
    )
    (scratch / "stay").unlink()
    assert launcher.wait(timeout=20) == 75
    assert [(scratch / f"received_{rank}").read_text() for rank in range(2)] == [
        "SIGUSR1 SIGTERM"
    ] * 2


def test_a_signal_before_any_rank_stops_the_agent(start, tmp_path):
    launcher = start(SLEEPING_AGENT)
    agent_pid = read_pid(tmp_path / "scratch" / "agent")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 75
    assert not is_alive(agent_pid)


def test_nohup_keeps_sighup_from_launcher_and_ranks(start, tmp_path):
    rank = "import signal, sys; from trainer.runtime.signals import heeded_signals; from pathlib import Path\n"
    rank += "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.SIGHUP not in heeded_signals()\n"
    (tmp_path / "rank.py").write_text(rank + RANK.replace(", signal.SIGHUP", ""))
    launcher, scratch = start(AGENT, "nohup"), tmp_path / "scratch"
    wait_for_ranks(scratch)
    os.killpg(launcher.pid, signal.SIGHUP)
    time.sleep(0.3)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 75
    assert [(scratch / f"received_{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2


def test_kill_9_of_the_process_group_leaves_nothing(start, tmp_path):
    launcher = start(SLEEPING_AGENT)
    agent_pid = read_pid(tmp_path / "scratch" / "agent")
    assert os.getsid(agent_pid) == agent_pid != os.getsid(launcher.pid)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait(timeout=20)
    assert wait_until(lambda: not is_alive(agent_pid))


HOLDS_THE_STORE = """
import os
from torch.distributed import TCPStore
from trainer.runtime.distributed import free_port
port = free_port()
if os.fork() == 0:
    TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False).get("asked")
    os.kill(os.getpid(), 9)
store = TCPStore("127.0.0.1", port, 2, False)
store.set("asked", "")
try:
    store.wait(["never"])
except RuntimeError as error:
    print(type(error).__name__)
"""


def test_a_lost_rank_prints_no_stack_of_torch():
    env = rank_environment(
        {**os.environ, "PYTHONPATH": str(ROOT)}, NodeLayout(), num_ranks=2, status=Status("none")
    )
    command = [sys.executable, "-c", HOLDS_THE_STORE]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("DistNetworkError\n", "")
