"""Rows of a log as columns of numbers, and what counts of them in the end.

R rows in the order in which they were written.
"""

from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint import layout
from trainer.report.readers.checkpoints import find_checkpoints
from trainer.report.readers.parsing import as_number, as_step, canonical
from trainer.report.run_log import RunLog, Series
from trainer.runtime.json_lines import JsonLines, flat

BLOCK_ROWS = 16384
MAX_COLUMNS = 20000
"""More different keys than any run has; a damaged file must not make one array for each of its rows."""
CLOCK = "ts"
"""The column with the wall time of a row in seconds, where a format has one; it is no metric."""
_ABSENT_BITS = 0x7FF8_0000_0000_0ABC
_ABSENT = float(np.int64(_ABSENT_BITS).view(np.float64))
"""Stands where a row has no number: a NaN that no log holds."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
Mask = NDArray[np.bool_]


class Restart(NamedTuple):
    """From `row` on the run went on after `step`; None = after the step before that row's.

    `rewinds`: earlier rows of later steps no longer count, even those that were not written again.
    """

    row: int
    step: int | None = None
    rewinds: bool = False


@dataclass(frozen=True)
class _Table:
    """The rows with the same keys. Arrays grow in place: one block of memory each, and no holes of small ones."""

    columns: dict[str, "array[float]"]
    rows: "array[int]" = field(default_factory=lambda: array("i"))
    waiting: list[tuple[Any, ...]] = field(default_factory=list)

    def flush(self) -> None:
        """Rows that wait become arrays many at a time, which makes it fast."""
        for column, cells in zip(self.columns.values(), zip(*self.waiting, strict=True), strict=False):
            column.frombytes(_numbers(cells).tobytes())
        self.waiting.clear()

    def pop(self, name: str) -> tuple[Rows, Floats]:
        """Rows and numbers of a column; its memory is free afterwards."""
        rows, values = np.frombuffer(self.rows, np.int32), np.frombuffer(self.columns.pop(name))
        is_there = values.view(np.int64) != _ABSENT_BITS
        return rows[is_there], values[is_there]


@dataclass(frozen=True)
class _History:
    """What the restarts tell of the rows, and how many steps were trained again."""

    steps: Ints
    segments: Rows
    """The number of restarts before each row."""
    is_stale: Mask
    """Of steps beyond a later rewind."""
    is_disordered: Mask
    """Goes back without a restart."""
    num_lost_steps: int

    @classmethod
    def of(cls, steps: Ints, restarts: list[Restart]) -> "_History":
        segments = np.zeros(len(steps), np.int32)
        is_stale, is_disordered = np.zeros((2, len(steps)), np.bool_)
        num_lost, limit, stop, next_begin = 0, np.iinfo(np.int64).max, len(steps), None
        for number, (start, step, rewinds) in reversed([*enumerate([Restart(0, 0), *restarts])]):
            own = steps[start:stop]
            segments[start:stop] = number
            is_stale[start:stop] = own > limit
            is_disordered[start:stop] = own < np.maximum.accumulate(own)
            if rewinds and step is not None:
                limit = min(limit, step)
            if step is None and not len(own):
                continue
            begin = int(own[0]) - 1 if step is None else step
            if next_begin is not None:
                num_lost += max(0, max(begin, int(own.max(initial=0))) - next_begin)
            stop, next_begin = start, begin if start > 0 else None
        return cls(steps, segments, is_stale, is_disordered, num_lost)

    def mark_repeated(self, rows: Rows) -> None:
        """Of rows with the same keys: a validation row has others, and a restart explains what it repeats."""
        order = rows[np.lexsort((rows, self.steps[rows], self.segments[rows]))]
        is_same = (np.diff(self.steps[order]) == 0) & (np.diff(self.segments[order]) == 0)
        self.is_disordered[order[1:][is_same]] = True

    def last_of_steps(self, rows: Rows) -> NDArray[np.intp]:
        """Which of the rows count: the last of each step that no rewind took back, by rising step."""
        order = np.lexsort((rows, self.steps[rows]))
        order = order[~self.is_stale[rows[order]]]
        is_last = np.ones(len(order), np.bool_)
        is_last[:-1] = np.diff(self.steps[rows[order]]) > 0
        return order[is_last]


class Frame:
    """Takes rows one by one.

    Numbers inside strings count (`parse_number`), nested objects become `outer/inner`, everything else is left out.
    """

    def __init__(self) -> None:
        self.num_unparsed = 0
        self._steps = array("q")
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._names: set[str] = set()
        self._num_columns = 0
        self._restarts: list[Restart] = []

    @property
    def num_rows(self) -> int:
        return len(self._steps)

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The JSON objects of a file, one a line; lines that are none count as unparsed."""
        lines = JsonLines(path, is_final=True)
        for _, row in lines:
            yield row
        self.num_unparsed += lines.num_unparsed

    def add(self, step: Any, row: Mapping[str, Any]) -> None:
        """A row that was logged at `step`, a cell or JSON value; without one it counts as unparsed."""
        if (at := as_step(step)) is None:
            self.num_unparsed += 1
            return
        self._put(flat(row, separator="/") if dict in map(type, row.values()) else row)
        self._steps.append(at)
        if len(self._steps) % BLOCK_ROWS == 0:
            self._flush()

    def restart(self, step: int | None = None, *, rewinds: bool = False) -> None:
        """What is added from here on was trained after a restart from `step`."""
        self._restarts.append(Restart(self.num_rows, step, rewinds))

    def log(self, path: Path, source: str, run_dir: Path, **facts: Any) -> RunLog:
        """Sorted series under our keys, of each step the last row, and nothing that a rewind took back.

        `facts`: the fields of `RunLog` that the format tells besides.
        """
        self._flush()
        history = _History.of(np.array(self._steps, np.int64), self._restarts)
        clocks = [table.pop(CLOCK)[1] for table in self._tables.values() if CLOCK in table.columns]
        for table in self._tables.values():
            history.mark_repeated(np.frombuffer(table.rows, np.int32))
        known: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_unparsed": self.num_unparsed,
            "checkpoints": find_checkpoints(run_dir),
            "tracker_step": layout.read_pointer(run_dir).step,
            "num_attempts": 1 + len({restart.row for restart in self._restarts} - {0}),
            "num_lost_steps": history.num_lost_steps,
            "num_disordered_rows": int(history.is_disordered.sum()),
            "span_s": float(np.ptp(np.concatenate(clocks))) if sum(map(len, clocks)) > 1 else None,
        }
        return RunLog(path=path, source=source, series=self._series(history), **(known | facts))

    def _put(self, row: Mapping[str, Any]) -> None:
        """Beyond the limit sets of keys get a column for each key instead of one for each set, and no new key any."""
        keys = tuple(row)
        table = self._tables.get(keys)
        if table is None and len(keys) > 1 and self._num_columns + len(keys) > MAX_COLUMNS:
            for key, cell in row.items():
                self._put({key: cell})
            return
        if table is None:
            if len(self._names.union(keys)) > MAX_COLUMNS:
                return
            table = self._tables[keys] = _Table({key: array("d") for key in keys})
            self._num_columns += len(keys)
            self._names.update(keys)
        table.rows.append(len(self._steps))
        table.waiting.append(tuple(row.values()))

    def _flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def _series(self, history: _History) -> dict[str, Series]:
        homes: dict[str, list[_Table]] = {}
        for table in self._tables.values():
            for name in table.columns:
                homes.setdefault(name, []).append(table)
        series: dict[str, Series] = {}
        rows, picks, steps = np.empty(0, np.int32), np.empty(0, np.intp), np.empty(0, np.int64)
        for key, (name, factor) in _chosen(homes).items():
            parts = [table.pop(name) for table in homes[name]]
            own_rows, values = (np.concatenate(part) for part in zip(*parts, strict=True))
            if not np.array_equal(own_rows, rows):  # else it shares the steps of the metric before it
                rows, picks = own_rows, history.last_of_steps(own_rows)
                steps = history.steps[rows[picks]]
            if len(steps):
                series[key] = Series(steps, values[picks] * factor)
        return series


def _chosen(names: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Our key -> (column, factor to our unit): the column that has its name already, else the first."""
    chosen: dict[str, tuple[str, float]] = {}
    for name in names:
        key, factor = canonical(name)
        if key not in chosen or name == key:
            chosen[key] = (name, factor)
    return chosen


def _numbers(cells: tuple[Any, ...]) -> Floats:
    if type(cells[0]) in (int, float):
        with suppress(ValueError):  # lists of unequal lengths
            values = np.array(cells)
            if values.dtype.kind in "iuf" and values.ndim == 1:
                return values.astype(np.float64, copy=False)
    return np.array([_ABSENT if (number := as_number(cell)) is None else number for cell in cells])
