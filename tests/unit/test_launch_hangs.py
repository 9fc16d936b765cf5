"""Hangs of ranks that register like real ones: which end the run, what is kept, and that
nothing is left alive.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import wait_until

from trainer.runtime.distributed import free_port
from trainer.runtime.processes import is_alive

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, sys
from pathlib import Path
from trainer.launch import supervise
from trainer.launch.watchdog import Watchdog
from trainer.runtime.status import new_status
supervise.POLL_S = 0.1
with new_status(2) as status:
    env = {**os.environ, "SFT_STATUS": status.address}
    watchdog = Watchdog(status, run_dir=Path(sys.argv[1]), has_peers=False)
    sys.exit(supervise.supervise([sys.executable, *sys.argv[2:]], env=env, status=status, watchdog=watchdog))
"""
# Stands for torchrun; beside two ranks it has a child that never registers.
AGENT = """
import os, subprocess, sys
third = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.path.join(os.environ["SCRATCH"], "third.pid"), "w").write(str(third.pid))
ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "LOCAL_RANK": str(r)}) for r in range(2)]
codes = [rank.wait() for rank in ranks]
third.kill()
sys.exit(any(codes))
"""
RANK = """
import os, sys, threading, time
from pathlib import Path
from trainer.runtime.environment import local_rank
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import join_launcher
from trainer.runtime.status import launcher_status
scratch = Path(os.environ["SCRATCH"])
def is_asked(name):
    return (scratch / name).exists()
def train_until(name):
    while not is_asked(name):
        heartbeat.beat()
        time.sleep(0.02)
def wait_for_a_peer():
    time.sleep(60)
def hold_the_interpreter():
    sum(range(10**12))
def work_in_a_thread():
    time.sleep(60)
join_launcher()
heartbeat = Heartbeat()
threading.Thread(target=work_in_a_thread, daemon=True).start()
heartbeat.enter("train", limit_s=2.0)
(scratch / f"rank_{local_rank()}.pid").write_text(str(os.getpid()))
(scratch / f"ready_{local_rank()}").touch()
"""


@dataclass(frozen=True)
class Run:
    """A launcher at work, its run directory, and one in which its ranks and the test meet."""

    launcher: subprocess.Popen[str]
    scratch: Path
    run_dir: Path

    def pid(self, name: str) -> int:
        return int((self.scratch / f"{name}.pid").read_text())

    def ask(self, name: str) -> None:
        (self.scratch / name).touch()

    def end(self) -> tuple[int, str]:
        """(exit code, stderr); nothing of the run may be alive then."""
        _, stderr = self.launcher.communicate(timeout=60)
        assert [name for name in ("rank_0", "rank_1", "third") if is_alive(self.pid(name))] == [], (
            stderr
        )
        return self.launcher.returncode, stderr


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    """Starts two ranks that run `RANK` and then what the test gives, and waits until they train."""
    (scratch := tmp_path / "scratch").mkdir()
    launchers: list[subprocess.Popen[str]] = []

    def run(behaviour: str) -> Run:
        (tmp_path / "agent.py").write_text(AGENT)
        (tmp_path / "rank.py").write_text(RANK + behaviour)
        command = [sys.executable, "-c", LAUNCHER, tmp_path / "run"]
        command += [tmp_path / "agent.py", tmp_path / "rank.py"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SCRATCH": str(scratch)}
        launchers.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        assert wait_until(lambda: all((scratch / f"ready_{rank}").exists() for rank in range(2)))
        return Run(launchers[0], scratch, tmp_path / "run")

    yield run
    for launcher in launchers:
        launcher.kill()  # agent and ranks die with it
        launcher.communicate()
        if (third := scratch / "third.pid").exists() and is_alive(int(third.read_text())):
            os.kill(int(third.read_text()), signal.SIGKILL)


def test_a_rank_stopped_for_too_long_ends_the_run_with_the_stacks_of_the_others(
    start,
):
    run = start("train_until('wait' if local_rank() == 0 else 'end')\nwait_for_a_peer()\n")
    os.kill(run.pid("rank_0"), signal.SIGUSR2)  # somebody looked at an earlier moment
    time.sleep(0.3)
    run.ask("wait")
    time.sleep(0.3)  # the innocent rank falls silent first, as one that waits may seem to
    os.kill(run.pid("rank_1"), signal.SIGSTOP)
    code, stderr = run.end()
    assert code == 75
    assert sorted(path.name for path in (run.run_dir / "hang_1").iterdir()) == [
        "rank_0.txt",
        "rank_1.txt",
    ]
    waiting, stopped = [
        (run.run_dir / "hang_1" / f"rank_{rank}.txt").read_text() for rank in range(2)
    ]
    assert (
        " in wait_for_a_peer" in waiting
        and " in work_in_a_thread" in waiting
        and " in train_until" not in waiting
    )
    assert stopped.endswith("\n\nno stack: stopped by a signal\n")
    first, second, third, fourth = stderr.splitlines()
    assert first.startswith("ERROR: the run hangs") and "continue with the same command" in first
    assert second.startswith(f"  rank 1 (pid {run.pid('rank_1')}): phase 'train', silent for ")
    assert second.endswith(" s, limit 2 s, stopped by a signal")
    assert third.startswith(f"  rank 0 (pid {run.pid('rank_0')}): phase 'train', silent for ")
    assert fourth == f"  stacks: in {run.run_dir / 'hang_1'}"


def test_a_rank_that_is_stopped_for_a_moment_survives(start):
    run = start("train_until('end')\n")
    for _ in range(4):
        os.kill(run.pid("rank_1"), signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(run.pid("rank_1"), signal.SIGCONT)
        time.sleep(0.3)
    assert run.launcher.poll() is None
    run.ask("end")
    assert run.end() == (0, "")


def test_a_rank_that_holds_the_interpreter_in_c_shows_where(start):
    run = start("hold_the_interpreter() if local_rank() else train_until('end')\n")
    code, stderr = run.end()
    assert code == 75
    text = (run.run_dir / "hang_1" / "rank_1.txt").read_text()
    assert " in hold_the_interpreter" in text and " in work_in_a_thread" in text
    assert " in train_until" in (run.run_dir / "hang_1" / "rank_0.txt").read_text()
    assert stderr.splitlines()[1].startswith("  rank 1")


@pytest.mark.parametrize("limit", ["None", "60"])
def test_a_phase_has_its_own_limit(limit, start):
    run = start(
        f"heartbeat.enter('save', limit_s={limit})\ntime.sleep(3)\nheartbeat.enter('train', "
        f"limit_s=2.0)\n"
    )
    assert run.end() == (0, "")


def test_a_failure_that_a_rank_reported_stays_the_exit_code(start):
    run = start("launcher_status().report(65)\nwait_for_a_peer()\n")
    assert run.end()[0] == 65


def test_a_rank_that_never_joins_ends_the_run_with_the_stacks_of_those_who_wait(
    start,
):
    run = start(
        f"""
heartbeat.enter("start", limit_s=None)
import torch
from trainer.runtime import distributed
os.environ.update(RANK=str(local_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
if local_rank() == 1:
    wait_for_a_peer()
distributed.start(torch.device("cpu"), timeout_s=2, fsdp_size=-1, heartbeat=heartbeat)
"""
    )
    code, stderr = run.end()
    assert code == 75
    assert "): phase 'meet', silent for " in stderr and " s, limit 2 s" in stderr
    assert " in init_process_group" in (run.run_dir / "hang_1" / "rank_0.txt").read_text()
    assert " in wait_for_a_peer" in (run.run_dir / "hang_1" / "rank_1.txt").read_text()


def test_a_port_to_meet_at_is_none_that_another_connection_may_get():
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < least for _ in range(100))
