"""Ends a run whose ranks make no progress, and saves the stacks of all ranks.

The watchdog runs in the launcher, because a hung rank may be stopped by a signal or hold the
interpreter inside C code. Every launcher watches the ranks of its own machine: ranks that wait for
a hung rank elsewhere become silent too.
"""

import itertools
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.runtime.processes import begun, status_of
from trainer.runtime.status import Beat, Status

MAX_GAP_S = 5.0
"""The longest silence that counts between two polls. If the launcher itself was suspended, the
ranks probably were too.
"""
STACKS_S = 2.0
"""Time that a rank gets to write its stacks."""
COPY_S = 10.0
"""Time limit for writing into the run directory, because the cause of the hang may be a dead file
system.
"""
PEERS_S = 10.0
"""Ranks with peers on other machines live this long after a hang is found, so that the other
launchers see silence instead of a broken connection. An agent may outlive its ranks by this time.
"""
GONE_S = 5.0
CONDITIONS = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "blocked in the kernel by a disk or a driver",
}


@dataclass
class Rank:
    """A rank of this machine, its last beat, and the seconds since the launcher saw the beat
    change.
    """

    number: int
    process: psutil.Process
    beat: Beat
    silent_s: float = 0.0

    @property
    def is_alive(self) -> bool:
        return status_of(self.process) != ""

    @property
    def is_hung(self) -> bool:
        return self.silent_s > self.beat.limit_s and self.is_alive

    @property
    def condition(self) -> str:
        status = status_of(self.process)
        return CONDITIONS.get(status, status)

    def __str__(self) -> str:
        limit = "not watched" if math.isinf(self.beat.limit_s) else f"limit {self.beat.limit_s:g} s"
        silence = f"phase '{self.beat.phase}', silent for {self.silent_s:.1f} s, {limit}"
        return f"rank {self.number} (pid {self.process.pid}): {silence}, {self.condition}"


@dataclass(eq=False)
class Watchdog:
    """Finds hung ranks and idle agents. The launcher polls `finds_hang` and `finds_idle_agent`
    every second.
    """

    status: Status
    run_dir: Path
    has_peers: bool

    def __post_init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        self._polled_at = time.monotonic()
        self._ended_at = math.inf

    def finds_hang(self) -> bool:
        """Return True if a living rank has been silent for longer than its phase allows, by the
        launcher's clock.
        """
        now = time.monotonic()
        passed_s = min(now - self._polled_at, MAX_GAP_S)
        self._polled_at = now
        for number, beat in self.status.beats().items():
            rank = self._ranks.get(number)
            if rank is None:
                with suppress(psutil.NoSuchProcess):
                    self._ranks[number] = Rank(number, psutil.Process(beat.pid), beat)
            elif beat == rank.beat:
                rank.silent_s += passed_s
            else:
                rank.beat = beat
                rank.silent_s = 0.0
        return any(rank.is_hung for rank in self._ranks.values())

    def finds_idle_agent(self) -> bool:
        """Return True if all ranks here ended `PEERS_S` ago but the agent did not. Such an agent is
        stopped, or is waiting five more minutes for other machines.
        """
        if not self._ranks or any(rank.is_alive for rank in self._ranks.values()):
            self._ended_at = math.inf
            return False
        self._ended_at = min(self._ended_at, time.monotonic())
        return time.monotonic() > self._ended_at + PEERS_S

    def end_run(self, agent: subprocess.Popen) -> None:
        """Save the stacks, print which rank hangs, and kill the agent with all its descendants.

        This takes at most half a minute and raises nothing, even if the run directory hangs.
        """
        found_at = time.monotonic()
        try:
            with suppress(OSError):  # stderr may be closed
                self._report()
            if self.has_peers:
                time.sleep(max(0.0, found_at + PEERS_S - time.monotonic()))
        finally:
            self.kill(agent)

    def kill(self, agent: subprocess.Popen) -> None:
        """End the agent and all its descendants."""
        processes = {rank.process for rank in self._ranks.values()}
        with suppress(psutil.Error):
            processes.update(psutil.Process(agent.pid).children(recursive=True))
        agent.kill()  # first, because it would report every killed rank as an error
        _send(processes, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            agent.wait(GONE_S)
        psutil.wait_procs(processes, timeout=GONE_S)

    def _report(self) -> None:
        """Write the stacks into the run directory, and the state of every rank to stderr.

        Raises `OSError`.
        """
        living = [rank for rank in self._ranks.values() if rank.is_alive]
        # the likely cause first: a stopped rank, then the one with the oldest beat
        ranks = sorted(living, key=lambda rank: ("stopped" not in rank.condition, rank.beat.at_s))
        lines = [str(rank) for rank in ranks]  # before SIGUSR2 changes the conditions
        stacks = self._collect_stacks(ranks)
        files = {
            f"rank_{rank.number}.txt": f"{line}\n\n{text}"
            for rank, line, text in zip(ranks, lines, stacks, strict=True)
        }
        try:
            writing = begun(lambda: _write_hang_dir(self.run_dir, files))
            place = f"in {writing.result(COPY_S)}"
        except OSError as error:
            print("\n".join(files.values()), file=sys.stderr)
            reason = str(error) or f"no response within {COPY_S:g} s"
            place = f"above, because nothing can be written to {self.run_dir}: {reason}"
        listing = "\n".join(f"  {line}" for line in lines)
        print(
            f"ERROR: the run hangs: no progress within the time limit of its phase. The launcher "
            f"kills all ranks on {socket.gethostname()}. Fix: continue with the same command. "
            f"Ranks, the most likely cause first:\n{listing}\n  stacks: {place}",
            file=sys.stderr,
            flush=True,
        )

    def _collect_stacks(self, ranks: list[Rank]) -> list[str]:
        """Return the stacks of all threads of each rank, or the reason why there are none."""
        # a user may have asked for stacks earlier
        sizes = [len(self.status.stacks(rank.number)) for rank in ranks]
        _send([rank.process for rank in ranks], signal.SIGUSR2)
        time.sleep(STACKS_S)
        return [
            self.status.stacks(rank.number)[size:].decode(errors="replace")
            or f"no stack: {rank.condition}\n"
            for rank, size in zip(ranks, sizes, strict=True)
        ]


def _write_hang_dir(run_dir: Path, files: Mapping[str, str]) -> Path:
    """Write the files into a new directory `hang_<n>`. Creating it reserves the number, because
    other machines may write their stacks at the same time.
    """
    for number in itertools.count(1):
        place = run_dir / f"hang_{number}"
        with suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
