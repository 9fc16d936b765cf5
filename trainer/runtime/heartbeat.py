"""Writes a rank's heartbeat for the launcher's watchdog, and finds out whether a run trains in a
directory.

Each beat overwrites the record in the rank's file of the launcher's status. The launcher reads this
file itself, so it also notices ranks that are stopped or stuck in C code.
"""

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path

from trainer.runtime.environment import local_rank, rank_and_size
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import read_object
from trainer.runtime.processes import born_at, is_alive
from trainer.runtime.status import Beat, launcher_status, write_beat

LOCK = ".train.lock"
"""Name of the file with the record of the training process. A run empties the file when it releases
the lock; a killed run leaves its record.
"""
REPORT_DIRECTORY = "heartbeat"
REPORT_EVERY_S = 30.0
SILENT_S = 3 * REPORT_EVERY_S


class Heartbeat:
    """Shows the launcher that this rank makes progress, and how long it may currently be silent.

    Use it in the main thread only: a beat from another thread would hide that the main thread
    hangs. The first beat registers the rank: from then on the launcher may send it signals. Without
    a launcher, nothing watches the rank.
    """

    def __init__(self) -> None:
        status = launcher_status()
        self.step = 0
        self._file = None if status is None else status.open_rank(local_rank())
        self._report: Path | None = None
        self._next_report_s = 0.0
        self.enter("start", limit_s=math.inf)

    def report_to(self, run_dir: Path) -> None:
        """Begin to write step, phase and time to `heartbeat/rank_<rank>.json` in `run_dir` every
        30 s. On other machines, `is_live` recognises the run by these files.
        """
        self._report = run_dir / REPORT_DIRECTORY / f"rank_{rank_and_size()[0]}.json"
        self.beat()

    def enter(self, phase: str, *, limit_s: float) -> None:
        """Begin a phase in which `limit_s` seconds without a beat mean that the rank hangs. With
        infinity, the rank is not watched.

        All ranks enter a phase together, even if only one works in it: ranks that wait for it are
        silent too.
        """
        self._phase_name = phase
        self._limit_s = limit_s
        self.beat()

    def beat(self) -> None:
        """Record progress within the phase. A beat writes 56 bytes to memory, which is cheap enough
        for every micro-batch.
        """
        now = time.monotonic()
        if self._report is not None and now >= self._next_report_s:
            self._next_report_s = now + REPORT_EVERY_S
            self._write_report(self._report)
        if self._file is not None:
            write_beat(self._file, Beat(os.getpid(), now, self._limit_s, self._phase_name))

    def _write_report(self, path: Path) -> None:
        content = {
            "rank": rank_and_size()[0],
            "step": self.step,
            "phase": self._phase_name,
            "ts": round(time.time(), 3),
        }
        with contextlib.suppress(OSError):  # a full disk must not end the run
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(content) + "\n", is_durable=False)


def is_live(run_dir: Path) -> bool:
    """Return True while a run trains in `run_dir`. A run on this machine is recognised by its
    process, a run on another machine by its newest heartbeat.
    """
    record = read_object(run_dir / LOCK)
    if record.get("host") == socket.gethostname():
        return trainer_pid(run_dir) is not None
    files = run_dir.glob(f"{REPORT_DIRECTORY}/rank_*.json") if record else ()
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    return time.time() - newest < SILENT_S


def trainer_pid(run_dir: Path) -> int | None:
    """Return the pid of the process on this machine that trains in `run_dir`; None if there is
    none.
    """
    record = read_object(run_dir / LOCK)
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return None
    # otherwise a different process has this pid now
    is_holder = record.get("born") in (None, born_at(pid))
    return pid if is_holder and is_alive(pid) else None
