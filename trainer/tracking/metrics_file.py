"""`metrics.jsonl`, the source of truth of a run: its writer and its reader.

One flat JSON object a line: `step`, `attempt`, `kind`, `ts` (Unix seconds), then the metrics. JSON has no NaN: such a
value is null, and `nonfinite` maps its key to "nan", "inf" or "-inf". Rows are appended and never rewritten: a resumed
run is a new attempt and writes its steps again; readers take the newest attempt of a step.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.protocols import CannotWriteError
from trainer.tracking.files import drop_torn_tail

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
RESERVED = frozenset({"step", "attempt", "kind", "ts", "nonfinite"})


def row_kind(data: Mapping[str, float]) -> str:
    """ "val" as soon as one key starts with `val/`, else "train"."""
    return "val" if any(key.startswith("val/") for key in data) else "train"


def checked(data: Mapping[str, Any]) -> dict[str, float]:
    """A copy with plain numbers only. Raises `TypeError` or `ValueError` naming the key."""
    numbers: dict[str, float] = {}
    for key, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"metric '{key}' is a {type(value).__name__}, not an int or float: reduce it and read it back "
                f"(.item()) before logging"
            )
        if key in RESERVED:
            raise ValueError(f"metric '{key}' collides with a column of {FILE_NAME}: rename it, e.g. 'train/{key}'")
        numbers[key] = int(value) if isinstance(value, int) else float(value)
    return numbers


class MetricsFile:
    """Appends rows, each by one `write` on an O_APPEND descriptor; `attempt` counts the openings that wrote a row.

    Raises `CannotWriteError` when the file cannot be opened. A row that cannot be written later (disk full) is lost
    with one warning: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            drop_torn_tail(path)
        except OSError as error:
            raise CannotWriteError(f"cannot open {path}: {error}; free space or choose another directory") from error
        self.attempt = 1 + max((row["attempt"] for row in _rows(path)), default=0)

    def append(self, data: Mapping[str, float], step: int) -> None:
        nonfinite = {key: str(value) for key, value in data.items() if not math.isfinite(value)}
        row: dict[str, Any] = {
            "step": step,
            "attempt": self.attempt,
            "kind": row_kind(data),
            "ts": round(time.time(), 3),
        }
        row |= {key: None if key in nonfinite else value for key, value in data.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            num_written = os.write(self._descriptor, line)
            if num_written < len(line):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_written)
                raise OSError(f"only {num_written} of {len(line)} bytes fitted")
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        os.close(self._descriptor)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning(
                "cannot write %s: %s; training goes on, rows are lost until it works again", self._path, error
            )
        self._warned = True


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows that count, sorted by step: of each (kind, step) the newest attempt, and of that the last row.

    Torn or foreign lines are passed over. Values named in `nonfinite` are floats again.
    """
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    for row in _rows(path):
        place = (row["step"], row["kind"])
        if place not in newest or row["attempt"] >= newest[place]["attempt"]:
            newest[place] = row | {key: float(value) for key, value in row.get("nonfinite", {}).items()}
    return [newest[place] for place in sorted(newest)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.keys() >= {"step", "attempt", "kind"}:
                yield row
