"""The writer and the reader of `metrics.jsonl`, which is the source of truth about a run.

Each line is a flat JSON object with `step`, `attempt`, `kind`, `ts` (Unix seconds), then the
metrics. JSON has no NaN and no infinity. Such a value is null, and `nonfinite` maps its key to
"nan", "inf" or "-inf".

The kinds of rows are "train", "val", "end" (metrics that became known only after the last step) and
any other logged kinds ("system", "epoch"). Two more kinds are markers without metrics: every
attempt writes "start" before its first row, and an attempt writes "rollback" when it goes back.
Rows are appended and never rewritten.

A marker with step s means that the run continues from the finished step s: earlier rows with later
steps no longer count. If several rows with the same kind and step count, the last value of each
metric is used.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES, AppendFile, JsonLines, parsed
from trainer.tracking.metrics.words import split_reducer

FILE_NAME = "metrics.jsonl"
RESERVED = frozenset({"step", "attempt", "kind", "ts", "nonfinite"})
START = "start"
ROLLBACK = "rollback"
MARKERS = (START, ROLLBACK)


_COLUMNS = re.compile(rb'\{"step":(\d+),"attempt":(\d+),"kind":"(\w+)","ts":[\d.]+[,}]')
"""Matches the beginning of every line that `MetricsFile` writes."""


@dataclass(frozen=True)
class Past:
    """A summary of the earlier attempts."""

    num_attempts: int
    duration_s: float
    last_step: int
    """The last step whose rows are still valid."""


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of a finished step; step 0 is the state before training. `ts` is in Unix seconds,
    to the millisecond.
    """

    step: int
    kind: str
    ts: float
    data: Mapping[str, float]

    @classmethod
    def of(
        cls,
        data: Mapping[str, Any],
        step: int,
        kind: str | None = None,
    ) -> "MetricsRow":
        """Make a row with the current time.

        Without `kind`, the kind is "val" if a key starts with `val/` or `eval/`, otherwise "train".
        A reducer suffix such as `@sum` is removed from a key. Raises `TypeError`, which names the
        key, for a value that is not a plain number, and `ValueError` for a reserved key or kind.
        """
        if kind in MARKERS:
            raise ValueError(f"only Tracking writes rows of kind '{kind}': choose a different kind")
        numbers: dict[str, float] = {}
        for key, value in data.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"metric '{key}' is a {type(value).__name__}, not an int or float: reduce it "
                    f"and read it back (.item()) before logging"
                )
            name, _ = split_reducer(key)
            if name in RESERVED:
                raise ValueError(
                    f"metric '{key}' collides with a column of {FILE_NAME}: rename it, e.g. "
                    f"'train/{name}'"
                )
            # convert a subclass such as numpy.float64 to the plain number
            numbers[name] = int(value) if isinstance(value, int) else float(value)
        is_validation = any(key.startswith(("val/", "eval/")) for key in numbers)
        kind = kind or ("val" if is_validation else "train")
        return cls(step, kind, now_s(), numbers)


class MetricsFile(AppendFile):
    """Appends rows and markers. `past` sums up the file's contents when it was opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.past = read_past(path)
        self.attempt = 1 + self.past.num_attempts
        """The number of this attempt. Earlier attempts count if they wrote a line."""

    def write(self, row: MetricsRow) -> None:
        nonfinite = {key: str(value) for key, value in row.data.items() if not math.isfinite(value)}
        content = {"step": row.step, "attempt": self.attempt, "kind": row.kind, "ts": row.ts}
        content |= row.data
        if nonfinite:
            content |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        self.append(content)

    def mark(self, kind: str, step: int) -> None:
        """Write a marker: `kind` is `START` or `ROLLBACK`."""
        self.write(MetricsRow(step, kind, now_s(), {}))


def now_s() -> float:
    """Return the current time in Unix seconds, to the millisecond."""
    return round(time.time(), 3)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows that no later attempt or rollback replaced, sorted by step and kind.

    Values that are named in `nonfinite` are converted back to floats. Damaged or unrelated lines
    are skipped.
    """
    return list(_contents(path))


def read_rows(path: Path, *, before_attempt: int | None = None) -> Iterator[MetricsRow]:
    """Yield the rows of `read_metrics` one by one to limit the memory of a long run.

    With `before_attempt`, yield only the rows that earlier attempts wrote.
    """
    for content in _contents(path, before_attempt):
        data = {key: value for key, value in content.items() if key not in RESERVED}
        yield MetricsRow(content["step"], content["kind"], content.get("ts", 0.0), data)


def read_places(path: Path, *, before_attempt: int) -> Iterator[tuple[int, str]]:
    """Yield (step, kind) of every row of earlier attempts, including rows that no longer count."""
    return ((step, kind) for step, attempt, kind, _ in _columns(path) if attempt < before_attempt)


def read_past(path: Path) -> Past:
    """Sum up the earlier attempts. Raises `OSError`."""
    num_attempts = last_step = 0
    last_row = b""
    for step, attempt, kind, line in _columns(path):
        num_attempts = max(num_attempts, attempt)
        last_step = step if kind in MARKERS else max(last_step, step)
        if kind == "train":
            last_row = line
    # not the difference of two `ts`: the clock may have been set in between
    elapsed_s = (parsed(last_row) or {}).get("progress/elapsed_s")
    duration_s = elapsed_s if isinstance(elapsed_s, int | float) else 0.0
    return Past(num_attempts, duration_s, last_step)


def _columns(path: Path) -> Iterator[tuple[int, int, str, bytes]]:
    """Yield (step, attempt, kind, line) of every line. Only the beginning of each line is parsed, so
    a million rows take about a second.
    """
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        for match in filter(None, map(_COLUMNS.match, file)):
            step, attempt, kind = match.groups()
            yield int(step), int(attempt), kind.decode(), match.string


def _contents(path: Path, before_attempt: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_metrics`. Only their offsets in the file are kept in memory."""
    places: dict[tuple[int, str], list[int]] = {}
    for offset, content in JsonLines(path):
        step, kind, attempt = (content.get(name) for name in ("step", "kind", "attempt"))
        if not (isinstance(step, int) and isinstance(kind, str) and isinstance(attempt, int)):
            continue
        if kind in MARKERS:
            places = {place: offsets for place, offsets in places.items() if place[0] <= step}
        elif before_attempt is None or attempt < before_attempt:
            places.setdefault((step, kind), []).append(offset)
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        for place in sorted(places):
            merged: dict[str, Any] = {}
            for offset in places[place]:
                file.seek(offset)
                content = json.loads(file.readline())
                with suppress(ValueError, TypeError, AttributeError):  # the file was edited by hand
                    nonfinite = content.get("nonfinite", {}).items()
                    content |= {key: float(text) for key, text in nonfinite}
                merged |= content
            yield merged
