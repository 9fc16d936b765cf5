"""Compares two finished runs: steps, validations, checkpoints, and all other user-visible results."""

import csv

from trainer.checkpoint import finished, fsio, layout
from trainer.checkpoint.layout import READING_PREFIX
from trainer.checkpoint.lock import is_given_back
from trainer.tools import mirror
from trainer.tools.verify import equality
from trainer.tracking import events_file, histories

TIMED = "seconds"
"""The column of the histories that differs in every run."""
OUTSIDE = (mirror.STATE, READING_PREFIX)
"""Prefixes of the names of files that are written after the end."""


def compare_runs(left, right, *, steps):
    found = equality.compare_runs(left, right, steps=steps)
    for name in histories.FILE_NAMES.values():
        found.add(name, _history(left / name), _history(right / name))
    for place, look in _ENDS.items():
        found.add(place, look(left), look(right))
    return found


def _history(path):
    """Its lines, but for times; None without the file."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [{name: cell for name, cell in line.items() if name != TIMED} for line in lines]


def _others(run_dir):
    names = [name for name in fsio.list_dir(run_dir) if layout.parse_step(name) is None]
    return ", ".join(sorted(name for name in names if not name.startswith(OUTSIDE)))


def logged_exit_code(run_dir):
    """Return the exit code of the last attempt in its events; None if the attempt has no end."""
    events = events_file.read_events(run_dir / events_file.FILE_NAME)
    return next(
        (event.get("exit_code") for event in events[::-1] if event["kind"] in ("start", "end")),
        None,
    )


_ENDS = {
    "step to continue from": lambda run_dir: layout.read_pointer(run_dir).step,
    "checkpoints kept": lambda run_dir: len(layout.committed(run_dir)),
    "what else the directory holds": _others,
    "exit code in its log": logged_exit_code,
    "lock given back": is_given_back,
    "checkpoints that ended a run": lambda run_dir: [
        info.step for info in layout.committed(run_dir) if finished.read(info.path) is not None
    ],
}
