"""Whether a run directory is being trained in right now, from the record in its lock file."""

import socket
import time
from pathlib import Path

from trainer.runtime.heartbeat import REPORT_DIRECTORY, REPORT_EVERY_S
from trainer.runtime.json_lines import read_object
from trainer.runtime.processes import is_alive

LOCK = ".train.lock"
"""Its holder's record; empty once the run has given it back, left as it is by one that was killed."""
SILENT_S = 3 * REPORT_EVERY_S


def is_live(run_dir: Path) -> bool:
    """On this machine by the process, from another one by the newest heartbeat."""
    record = read_object(run_dir / LOCK)
    if record.get("host") == socket.gethostname():
        return trainer_pid(run_dir) is not None
    beats = [path.stat().st_mtime for path in run_dir.glob(f"{REPORT_DIRECTORY}/rank_*.json")] if record else []
    return time.time() - max(beats, default=0.0) < SILENT_S


def trainer_pid(run_dir: Path) -> int | None:
    """The process of this machine that trains there; None where there is none, or it runs elsewhere."""
    record = read_object(run_dir / LOCK)
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return None
    return pid if is_alive(pid) else None
