"""A launcher with an agent and two ranks that a test defines. The ranks register like real ones."""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import wait_until
from repository import REPOSITORY

LAUNCHER = """
import os, sys
from pathlib import Path
from trainer.launch import supervise, watchdog
from trainer.runtime.status import new_status
supervise.POLL_S = 0.1
watchdog.PEERS_S = float(os.environ.get("PEERS_S", watchdog.PEERS_S))
with new_status(2) as status:
    env = {**os.environ, "SFT_STATUS": status.address}
    dog = watchdog.Watchdog(status, run_dir=Path("run"), has_peers=False)
    command = [sys.executable, "agent.py"]
    sys.exit(supervise.supervise(command, env=env, status=status, watchdog=dog))
"""
AGENT = """
import os, subprocess, sys
from pathlib import Path
third = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path("third.pid").write_text(str(third.pid))
Path("agent.pid").write_text(str(os.getpid()))
ranks = [subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "LOCAL_RANK": str(r)}) for r in range(2)]
codes = [rank.wait() for rank in ranks]
third.kill()
sys.exit(any(codes))
"""
"""Replaces torchrun: it reports exit codes as 0 or 1. Its third child never registers."""


@dataclass(frozen=True)
class FakeLaunch:
    """A launcher running in a directory through which its processes and the test communicate."""

    process: subprocess.Popen[str]
    directory: Path

    def pid(self, name):
        """Return the process that wrote NAME.pid."""
        path = self.directory / f"{name}.pid"
        assert wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def rank_pids(self):
        return [self.pid(f"rank_{rank}") for rank in range(2)]

    def read(self, name):
        return (self.directory / name).read_text()

    def ask(self, name):
        (self.directory / name).touch()

    def end(self):
        """Return (exit code, stderr)."""
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@contextmanager
def launched(directory, *, rank="", agent=AGENT):
    """Start the launcher in a separate process group. Everything ends with the block."""
    (directory / "agent.py").write_text(agent)
    (directory / "rank.py").write_text(rank)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield FakeLaunch(process, directory)
    finally:
        process.kill()  # agent and ranks die with it
        process.communicate()
