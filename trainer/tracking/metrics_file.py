"""`metrics.jsonl`, the source of truth of a run: its writer and its reader.

One flat JSON object a line: `step`, `attempt`, `kind`, `ts` (Unix seconds), then the metrics. JSON
has no NaN: such a value is null, and `nonfinite` maps its key to "nan", "inf" or "-inf". Kinds are
"train", "val", "end" (what became known after the last step) and what else is logged ("system",
"epoch"), and two markers without metrics: "start", written by every attempt before its first row,
and "rollback", written inside an attempt. Rows are appended and never rewritten. A marker of step s
says that the run goes on from finished step s: rows of later steps before it no longer count. Of
what counts, the last row of each (kind, step) does, and of several without a marker between them
the last value of each metric.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.metrics.words import split_reducer
from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES, AppendFile, JsonLines

FILE_NAME = "metrics.jsonl"
RESERVED = frozenset({"step", "attempt", "kind", "ts", "nonfinite"})
START, ROLLBACK = "start", "rollback"
MARKERS = (START, ROLLBACK)


_COLUMNS = re.compile(rb'\{"step":(\d+),"attempt":(\d+),"kind":"(\w+)","ts":([\d.]+)[,}]')
"""How every line begins that is written here."""


@dataclass(frozen=True)
class Past:
    """What earlier attempts left: their number, time, how many steps were trained again, the
    last that counts.
    """

    num_attempts: int = 0
    duration_s: float = 0.0
    num_lost_steps: int = 0
    last_step: int = 0


@dataclass(frozen=True)
class MetricsRow:
    """Metrics of a finished step (0: before training); `ts` in Unix seconds, to the millisecond."""

    step: int
    kind: str
    ts: float
    data: Mapping[str, float]

    @classmethod
    def of(cls, data: Mapping[str, Any], step: int, kind: str | None = None) -> "MetricsRow":
        """A row of now. Without `kind` it is "val" as soon as one key starts with `val/` or
        `eval/`, else "train".

        Raises `TypeError` or `ValueError` naming the key for anything but plain numbers under
        unique names.
        """
        if kind in MARKERS:
            raise ValueError(
                f"rows of kind '{kind}' are written by Tracking alone: choose another kind"
            )
        numbers = _checked(data)
        return cls(step, kind or _kind(numbers), round(time.time(), 3), numbers)


def _kind(data: Mapping[str, float]) -> str:
    return "val" if any(key.startswith(("val/", "eval/")) for key in data) else "train"


def _checked(data: Mapping[str, Any]) -> dict[str, float]:
    """A copy with plain numbers only, under names without reducer."""
    numbers: dict[str, float] = {}
    for key, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"metric '{key}' is a {type(value).__name__}, not an int or float: reduce it and "
                f"read it back (.item()) before logging"
            )
        name, _ = split_reducer(key)
        if name in RESERVED:
            raise ValueError(
                f"metric '{key}' collides with a column of {FILE_NAME}: rename it, e.g. "
                f"'train/{name}'"
            )
        if name in numbers:
            raise ValueError(
                f"metric '{key}' is given twice in one row, without its reducer: rename one of them"
            )
        numbers[name] = int(value) if isinstance(value, int) else float(value)
    return numbers


class MetricsFile(AppendFile):
    """Of rows and markers; `past` is what was there when it was opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.past = read_past(path)

    @property
    def attempt(self) -> int:
        """Counts the openings that wrote a line."""
        return 1 + self.past.num_attempts

    def write(self, row: MetricsRow) -> None:
        nonfinite = {key: str(value) for key, value in row.data.items() if not math.isfinite(value)}
        content = self._columns(row.step, row.kind, row.ts)
        content |= {key: None if key in nonfinite else value for key, value in row.data.items()}
        if nonfinite:
            content["nonfinite"] = nonfinite
        self.append(content)

    def mark(self, kind: str, step: int) -> None:
        """Write a marker: `kind` is `START` or `ROLLBACK`."""
        self.append(self._columns(step, kind, round(time.time(), 3)))

    def _columns(self, step: int, kind: str, ts: float) -> dict[str, Any]:
        return {"step": step, "attempt": self.attempt, "kind": kind, "ts": ts}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows that count, sorted by step and kind, as written; values named in `nonfinite` are
    floats again.

    Torn or foreign lines are passed over.
    """
    return list(_contents(path))


def restored(content: dict[str, Any]) -> dict[str, Any]:
    """A line as it was logged: what `nonfinite` names is a float again."""
    return content | {key: float(value) for key, value in content.get("nonfinite", {}).items()}


def read_rows(path: Path, *, before_attempt: int | None = None) -> Iterator[MetricsRow]:
    """The same one by one, however long the run; with `before_attempt` only those that earlier
    attempts wrote.
    """
    for content in _contents(path, before_attempt):
        data = {key: value for key, value in content.items() if key not in RESERVED}
        yield MetricsRow(content["step"], content["kind"], content.get("ts", 0.0), data)


def read_past(path: Path) -> Past:
    """Reads only the columns every line begins with: a second for a million rows. Other lines
    are passed over.
    """
    first_ts: dict[int, float] = {}
    last_ts: dict[int, float] = {}
    last_step = num_lost_steps = 0
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        for match in map(_COLUMNS.match, file):
            if match is None:
                continue
            step, attempt, ts = int(match[1]), int(match[2]), float(match[4])
            first_ts.setdefault(attempt, ts)
            last_ts[attempt] = ts
            if match[3].decode() in MARKERS:
                num_lost_steps += max(0, last_step - step)
                last_step = step
            last_step = max(last_step, step)
    duration_s = sum(last_ts[attempt] - first_ts[attempt] for attempt in first_ts)
    return Past(max(first_ts, default=0), duration_s, num_lost_steps, last_step)


def missing_steps(path: Path, last_step: int) -> list[int]:
    """Steps up to `last_step` that have no training row, as after a full disk; those before the run
    began are none.

    As fast as `read_past`. Raises `OSError`.
    """
    trained: set[int] = set()
    first_step: int | None = None
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        for match in map(_COLUMNS.match, file):
            if match is None:
                continue
            step, kind = int(match[1]), match[3].decode()
            if first_step is None:
                first_step = step + 1 if kind == START else 1
            if kind == "train":
                trained.add(step)
            elif kind in MARKERS:
                trained = {trained_step for trained_step in trained if trained_step <= step}
    return [step for step in range(first_step or 1, last_step + 1) if step not in trained]


def _contents(path: Path, before_attempt: int | None = None) -> Iterator[dict[str, Any]]:
    places: dict[tuple[int, str], tuple[int, ...]] = {}
    for offset, content in _lines(path):
        step, kind = content["step"], content["kind"]
        if kind in MARKERS:
            places = {place: offsets for place, offsets in places.items() if place[0] <= step}
        elif before_attempt is None or content["attempt"] < before_attempt:
            places[step, kind] = (*places.get((step, kind), ()), offset)
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        for place in sorted(places):
            merged: dict[str, Any] = {}
            for offset in places[place]:
                file.seek(offset)
                merged |= restored(json.loads(file.readline()))
            yield merged


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for offset, content in JsonLines(path):
        if content.keys() >= {"step", "attempt", "kind"} and isinstance(content["step"], int):
            yield offset, content
