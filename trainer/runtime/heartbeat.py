"""A rank's sign of life for the launcher's watchdog, and whether a run lives in a directory (floor
1, no torch).

The rank's file in the launcher's status holds one record of fixed width that is overwritten in
place. The launcher reads it from outside, so that a rank that is stopped, or deep inside C code,
cannot hide its silence.
"""

import contextlib
import json
import math
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.runtime.environment import local_rank
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import read_object
from trainer.runtime.processes import born_at, is_alive
from trainer.runtime.status import launcher_status, write_beat

MAX_PHASE_BYTES = 24
REPORT_DIRECTORY = "heartbeat"
REPORT_EVERY_S = 30.0
_RECORD = struct.Struct(f"<Qdd{MAX_PHASE_BYTES}sQ")
"""Count, time of the beat, allowed silence, phase, and the count again: unequal counts are a
half-written record.
"""


@dataclass(frozen=True)
class Beat:
    """What a rank last said. `at_s` is on the clock all processes of a machine share; no limit
    means not watched.
    """

    count: int
    at_s: float
    limit_s: float | None
    phase: str


def unpack_beat(record: bytes) -> Beat | None:
    """The beat in a record; None for one that is not written yet (zeros), or half written."""
    if len(record) != _RECORD.size:
        return None
    count, at_s, limit_s, phase, count_again = _RECORD.unpack(record)
    if count == 0 or count != count_again:
        return None
    return Beat(
        count,
        at_s,
        None if math.isinf(limit_s) else limit_s,
        phase.rstrip(b"\0").decode(errors="replace"),
    )


class Heartbeat:
    """Tells the launcher that this rank makes progress, and how long it may be silent in what it
    does now.

    For the main thread only: a beat from a thread of its own would hide that the main thread hangs.
    Without a launcher nobody watches, and every call does nothing.
    """

    def __init__(self) -> None:
        status = launcher_status()
        self._file = None if status is None else status.open_beat(local_rank())
        self._report: Path | None = None
        self._next_report_s, self._rank, self.step = 0.0, 0, 0
        self._count = 0
        self.enter("start", limit_s=None)

    def report_to(self, run_dir: Path, *, rank: int) -> None:
        """From now on also keep `heartbeat/rank_<rank>.json` there, for people: step, phase and
        time, every 30 s.
        """
        self._report = run_dir / REPORT_DIRECTORY / f"rank_{rank}.json"
        self._rank = rank
        self._write_report()

    def enter(self, phase: str, *, limit_s: float | None) -> None:
        """Begin a phase in which `limit_s` seconds without a beat mean that the rank hangs; None:
        it is not watched.

        Ranks wait for each other, and a rank that waits is silent too: all ranks enter a phase
        together, also one in which a single rank works.
        """
        self._phase_name = phase
        self._limit_s = math.inf if limit_s is None else limit_s
        self.beat()

    def beat(self) -> None:
        """Progress within the phase: one write of 56 bytes into memory, cheap enough for every
        micro-batch.
        """
        if self._report is not None and time.monotonic() >= self._next_report_s:
            self._write_report()
        if self._file is None:
            return
        self._count += 1
        record = _RECORD.pack(
            self._count, time.monotonic(), self._limit_s, self._phase_name.encode(), self._count
        )
        write_beat(self._file, record)

    def _write_report(self) -> None:
        """A file that cannot be written is left out: nobody but a person misses it."""
        assert self._report is not None
        self._next_report_s = time.monotonic() + REPORT_EVERY_S
        content = {
            "rank": self._rank,
            "step": self.step,
            "phase": self._phase_name,
            "ts": round(time.time(), 3),
        }
        with contextlib.suppress(OSError):
            self._report.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._report, json.dumps(content) + "\n", is_durable=False)


LOCK = ".train.lock"
"""Its holder's record; empty once the run has given it back, left as it is by one that was
killed.
"""
SILENT_S = 3 * REPORT_EVERY_S


def is_live(run_dir: Path) -> bool:
    """On this machine by the process, from another one by the newest heartbeat."""
    record = read_object(run_dir / LOCK)
    if record.get("host") == socket.gethostname():
        return trainer_pid(run_dir) is not None
    beats = (
        [path.stat().st_mtime for path in run_dir.glob(f"{REPORT_DIRECTORY}/rank_*.json")]
        if record
        else []
    )
    return time.time() - max(beats, default=0.0) < SILENT_S


def trainer_pid(run_dir: Path) -> int | None:
    """The process of this machine that trains there; None where there is none, or it runs
    elsewhere.
    """
    record = read_object(run_dir / LOCK)
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return None
    # else another process has its number by now
    is_holder = record.get("born") in (None, born_at(pid))
    return pid if is_holder and is_alive(pid) else None
