"""Ends a run in which a rank stopped making progress, and keeps the stacks of all ranks (floor 5,
no torch).

It works in the launcher, from outside of the ranks: a rank may be stopped by a signal, or hold the
interpreter inside C code. Every launcher watches the ranks of its own machine; those that wait for
a hung rank elsewhere fall silent too.
"""

import contextlib
import itertools
import math
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainer.runtime.heartbeat import Beat, unpack_beat
from trainer.runtime.processes import STOPPED, begun, status_of
from trainer.runtime.status import Status

MAX_GAP_S = 5.0
"""Longest silence counted between two polls: when the launcher itself was suspended, the ranks
had no chance either.
"""
STACKS_S = 2.0
SETTLED_S = 0.3
"""A rank writes its stacks in many small pieces; unchanged for this long they are complete."""
COPY_S = 10.0
PEERS_S = 10.0
"""How long ranks with peers elsewhere live on, so that every launcher sees its own ranks silent and
not yet broken; and an agent after its ranks, so that those elsewhere find the store in which they
meet.
"""
GONE_S = 5.0
CONDITIONS = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting in the kernel for a disk or a driver",
}


@dataclass(frozen=True)
class Rank:
    """A rank of this machine: its process, and its heartbeat as the launcher saw it."""

    number: int
    process: psutil.Process
    record: bytes = b""
    beat: Beat | None = None
    silent_s: float = 0.0

    @property
    def is_hung(self) -> bool:
        is_over = (
            self.beat is not None
            and self.beat.limit_s is not None
            and self.silent_s > self.beat.limit_s
        )
        return is_over and status_of(self.process) != ""


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
        """Whether a living rank has been silent for longer than its phase allows, by the
        launcher's own clock.
        """
        now = time.monotonic()
        passed_s, self._polled_at = min(now - self._polled_at, MAX_GAP_S), now
        for number, pid in self.status.pids().items():
            if number not in self._ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._ranks[number] = Rank(number, psutil.Process(pid))
        self._ranks = {
            number: self._observe(rank, passed_s) for number, rank in self._ranks.items()
        }
        return any(rank.is_hung for rank in self._ranks.values())

    def _observe(self, rank: Rank, passed_s: float) -> Rank:
        record = self.status.beat(rank.number)
        if record == rank.record:
            return replace(rank, silent_s=rank.silent_s + passed_s)
        return replace(rank, record=record, beat=unpack_beat(record) or rank.beat, silent_s=0.0)

    def end_run(self, agent: subprocess.Popen) -> None:
        """Keep the stacks, say which rank hangs, and kill the agent with every process below it.

        Done within half a minute, and without an error of its own, even when the run directory is
        what hangs.
        """
        found_at = time.monotonic()
        try:
            with contextlib.suppress(OSError):  # of stderr: nobody may be left to read it
                self._report()
            if self.has_peers:
                time.sleep(max(0.0, found_at + PEERS_S - time.monotonic()))
        finally:
            self.kill(agent)

    def finds_agent_waiting(self) -> bool:
        """Whether the ranks here ended in order a while ago: the agent gives other machines
        five minutes more.
        """
        if not (self.has_peers and self._have_ended()):
            self._ended_at = math.inf
            return False
        self._ended_at = min(self._ended_at, time.monotonic())
        return time.monotonic() > self._ended_at + PEERS_S

    def _have_ended(self) -> bool:
        return bool(self._ranks) and not any(
            status_of(rank.process) for rank in self._ranks.values()
        )

    def kill(self, agent: subprocess.Popen) -> None:
        """End the agent and every process below it."""
        processes = {rank.process for rank in self._ranks.values()}
        with contextlib.suppress(psutil.Error):
            processes.update(psutil.Process(agent.pid).children(recursive=True))
        agent.kill()  # first: it would report every killed rank as an error of its own
        for process in processes:
            _send(process, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(GONE_S)
        deadline = time.monotonic() + GONE_S
        while any(status_of(process) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _report(self) -> None:
        """The stacks into the run directory, one error with the state of every rank on stderr.
        Raises `OSError`.
        """
        ranks = sorted(
            (rank for rank in self._ranks.values() if status_of(rank.process)), key=_suspicion
        )
        # before a signal changes what they do
        lines = {rank.number: _describe(rank) for rank in ranks}
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
        """Stacks of all threads by number of the rank, or why there are none. Takes up to
        `STACKS_S`.
        """
        # a user may have asked before
        earlier = {rank.number: self.status.stacks(rank.number) for rank in ranks}
        awaited = [rank.number for rank in ranks if status_of(rank.process) not in STOPPED]
        for rank in ranks:
            _send(rank.process, signal.SIGUSR2)
        stacks, changed_at, deadline = earlier, time.monotonic(), time.monotonic() + STACKS_S
        while (now := time.monotonic()) < deadline:
            time.sleep(0.05)
            last, stacks = stacks, {number: self.status.stacks(number) for number in earlier}
            changed_at = changed_at if stacks == last else now
            if now - changed_at > SETTLED_S and all(
                stacks[number] != earlier[number] for number in awaited
            ):
                break
        dumped = {
            key: text.removeprefix(earlier[key]).decode(errors="replace")
            for key, text in stacks.items()
        }
        return {
            rank.number: dumped[rank.number] or f"no stack: {_condition(rank.process)}\n"
            for rank in ranks
        }


def _suspicion(rank: Rank) -> tuple[bool, float]:
    """Sorts the likely cause to the front: a stopped rank, then the one whose last beat is the
    oldest.
    """
    return status_of(rank.process) not in STOPPED, rank.beat.at_s if rank.beat else float("inf")


def _describe(rank: Rank) -> str:
    said = "no heartbeat yet"
    if rank.beat is not None:
        limit = "not watched" if rank.beat.limit_s is None else f"limit {rank.beat.limit_s:g} s"
        said = f"phase '{rank.beat.phase}', silent for {rank.silent_s:.1f} s, {limit}"
    return f"rank {rank.number} (pid {rank.process.pid}): {said}, {_condition(rank.process)}"


def _condition(process: psutil.Process) -> str:
    status = status_of(process)
    return CONDITIONS.get(status, status or "ended")


def _write_hang_dir(run_dir: Path, files: dict[str, str]) -> Path:
    """The files in `hang_<n>`, n the next free number; making the directory claims it against
    other machines.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (run_dir / f"hang_{number}").mkdir()
            break
    for name, text in files.items():
        (run_dir / f"hang_{number}" / name).write_text(text, encoding="utf-8")
    return run_dir / f"hang_{number}"


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
