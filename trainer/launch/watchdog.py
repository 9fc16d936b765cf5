"""Ends a run in which a rank stopped making progress, and keeps the stacks of all ranks.

It works in the launcher, from outside of the ranks: a rank may be stopped by a signal, or hold the
interpreter inside C code. Every launcher watches the ranks of its own machine; those that wait for
a hung rank elsewhere fall silent too.
"""

import itertools
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.runtime.processes import STOPPED, begun, status_of
from trainer.runtime.status import Beat, Status

MAX_GAP_S = 5.0
"""Longest silence counted between two polls: when the launcher itself was suspended, the ranks
had no chance either.
"""
STACKS_S = 2.0
"""A rank has written its stacks by then, in many small pieces."""
COPY_S = 10.0
PEERS_S = 10.0
"""Ranks with peers elsewhere live on for this long, so that every launcher sees its own ranks silent
and not yet broken. An agent outlives its ranks as long, so that ranks elsewhere find the store in
which they meet.
"""
GONE_S = 5.0
CONDITIONS = {
    "": "ended",
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting in the kernel for a disk or a driver",
}


@dataclass
class Rank:
    """A rank of this machine: its process, its last beat, and how long ago the launcher saw it."""

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
    def suspicion(self) -> tuple[bool, float]:
        """Sorts the likely cause to the front: a stopped rank, then the oldest last beat."""
        return status_of(self.process) not in STOPPED, self.beat.at_s

    @property
    def condition(self) -> str:
        status = status_of(self.process)
        return CONDITIONS.get(status, status)

    def __str__(self) -> str:
        limit = "not watched" if math.isinf(self.beat.limit_s) else f"limit {self.beat.limit_s:g} s"
        silence = f"phase '{self.beat.phase}', silent for {self.silent_s:.1f} s, {limit}"
        return f"rank {self.number} (pid {self.process.pid}): {silence}, {self.condition}"


class Watchdog:
    """Polled by the launcher: `finds_hang` every second, and once that is true `end_run`."""

    def __init__(self, status: Status, *, run_dir: Path, has_peers: bool) -> None:
        self.status = status
        self.run_dir = run_dir
        self.has_peers = has_peers
        self._ranks: dict[int, Rank] = {}
        self._polled_at = time.monotonic()
        self._ended_at = math.inf

    def finds_hang(self) -> bool:
        """Return True if a living rank has been silent for longer than its phase allows, by the
        launcher's own clock.
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
                rank.beat, rank.silent_s = beat, 0.0
        return any(rank.is_hung for rank in self._ranks.values())

    def end_run(self, agent: subprocess.Popen) -> None:
        """Keep the stacks, say which rank hangs, and kill the agent with every process below it.

        Done within half a minute, and without an error of its own, even when the run directory is
        what hangs.
        """
        found_at = time.monotonic()
        try:
            with suppress(OSError):  # of stderr: nobody may be left to read it
                self._report()
            if self.has_peers:
                time.sleep(max(0.0, found_at + PEERS_S - time.monotonic()))
        finally:
            self.kill(agent)

    def finds_agent_waiting(self) -> bool:
        """Return True if the ranks here ended in order a while ago: the agent gives other machines
        five minutes more.
        """
        ranks = self._ranks.values()
        if not self.has_peers or not ranks or any(rank.is_alive for rank in ranks):
            self._ended_at = math.inf
            return False
        self._ended_at = min(self._ended_at, time.monotonic())
        return time.monotonic() > self._ended_at + PEERS_S

    def kill(self, agent: subprocess.Popen) -> None:
        """End the agent and every process below it."""
        processes = {rank.process for rank in self._ranks.values()}
        with suppress(psutil.Error):
            processes.update(psutil.Process(agent.pid).children(recursive=True))
        agent.kill()  # first: it would report every killed rank as an error of its own
        _send(processes, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            agent.wait(GONE_S)
        deadline = time.monotonic() + GONE_S
        while any(map(status_of, processes)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _report(self) -> None:
        """The stacks into the run directory, one error with the state of every rank on stderr.
        Raises `OSError`.
        """
        living = [rank for rank in self._ranks.values() if rank.is_alive]
        ranks = sorted(living, key=lambda rank: rank.suspicion)
        # before a signal changes what they do
        lines = {rank.number: str(rank) for rank in ranks}
        stacks = self._collect_stacks(ranks)
        files = {
            f"rank_{number}.txt": f"{line}\n\n{stacks[number]}" for number, line in lines.items()
        }
        try:
            # with a time limit, because a dead file system may be what hangs
            place = f"in {begun(lambda: _write_hang_dir(self.run_dir, files)).result(COPY_S)}"
        except OSError as error:
            print("\n".join(files.values()), file=sys.stderr)
            reason = str(error) or f"no answer within {COPY_S:g} s"
            place = f"above, because nothing can be written to {self.run_dir}: {reason}"
        listing = "\n".join(f"  {line}" for line in lines.values())
        print(
            f"ERROR: the run hangs: no progress for longer than a phase allows; all ranks of "
            f"{socket.gethostname()} are killed, continue with the same command. Likely cause "
            f"first:\n{listing}\n  stacks: {place}",
            file=sys.stderr,
            flush=True,
        )

    def _collect_stacks(self, ranks: list[Rank]) -> dict[int, str]:
        """Stacks of all threads by number of the rank, or why there are none."""
        # a user may have asked for stacks before
        earlier = {rank.number: len(self.status.stacks(rank.number)) for rank in ranks}
        _send([rank.process for rank in ranks], signal.SIGUSR2)
        time.sleep(STACKS_S)
        found = {}
        for rank in ranks:
            stacks = self.status.stacks(rank.number)[earlier[rank.number] :]
            found[rank.number] = stacks.decode(errors="replace") or f"no stack: {rank.condition}\n"
        return found


def _write_hang_dir(run_dir: Path, files: Mapping[str, str]) -> Path:
    """The files in `hang_<n>`, n the next free number; making the directory claims it against
    other machines.
    """
    for number in itertools.count(1):
        place = run_dir / f"hang_{number}"
        with suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def _send(processes: Collection[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
