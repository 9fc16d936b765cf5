"""Rows of a log as columns of numbers, and what counts of them in the end.

R rows in the order in which they were written.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint import layout
from trainer.report.readers.checkpoints import find_checkpoints
from trainer.report.readers.parsing import Faults, as_number, as_step, canonical
from trainer.report.run_log import RunLog, Series
from trainer.runtime.json_lines import flat

BLOCK_ROWS = 16384
MAX_COLUMNS = 20000
"""More different keys than any run has; a damaged file must not make one array for each of its rows."""
CLOCK = "ts"
"""The column with the wall time of a row in seconds, where a format has one; it is no metric."""
_END = np.iinfo(np.int64).max

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Restart:
    """From `row` on the run went on after `step`; None = after the step before that row's.

    `rewinds`: earlier rows of later steps no longer count, even those that were not written again.
    """

    row: int
    step: int | None = None
    rewinds: bool = False


@dataclass(frozen=True)
class _Table:
    """Columns that are logged together. Arrays grow in place: one block of memory each, and no holes of small ones."""

    rows: "array[int]" = field(default_factory=lambda: array("i"))
    columns: dict[str, "array[float]"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Selection:
    """Which values of columns with the same rows count, in the order of their steps; `picks` None: all, as they are."""

    steps: Ints
    picks: NDArray[np.intp] | None


class Frame:
    """Takes rows one by one, and turns a block of them with equal keys into arrays at once, which makes it fast.

    Numbers inside strings count (`parse_number`), nested objects become `outer/inner`, everything else is left out.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self._steps = array("q")
        self._waiting: dict[tuple[str, ...], tuple[list[int], list[list[Any]]]] = {}
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._names: set[str] = set()
        self._num_columns = 0
        self._restarts: list[Restart] = []

    @property
    def num_rows(self) -> int:
        return len(self._steps)

    def add(self, step: Any, row: Mapping[str, Any]) -> None:
        """A row that was logged at `step`, a cell or JSON value; without one it counts as unparsed."""
        if (at := as_step(step)) is None:
            self.faults.num_unparsed += 1
            return
        self._wait(len(self._steps), row)
        self._steps.append(at)
        if len(self._steps) % BLOCK_ROWS == 0:
            self._flush()

    def restart(self, step: int | None = None, *, rewinds: bool = False) -> None:
        """What is added from here on was trained after a restart from `step`."""
        self._restarts.append(Restart(self.num_rows, step, rewinds))

    def log(self, path: Path, source: str, run_dir: Path) -> RunLog:
        """Sorted series under our keys, of each step the last row, and nothing that a rewind took back."""
        self._flush()
        steps = np.frombuffer(self._steps, dtype=np.int64) if self._steps else np.empty(0, dtype=np.int64)
        clocks = [np.frombuffer(t.columns.pop(CLOCK)) for t in self._tables.values() if CLOCK in t.columns]
        is_disordered = np.zeros(len(steps), dtype=np.bool_)
        for start, stop, _ in self._segments():
            is_disordered[start:stop] = steps[start:stop] < np.maximum.accumulate(steps[start:stop])
        series = self._series(steps, is_disordered)
        return RunLog(
            path=path,
            source=source,
            series=series,
            num_rows=self.num_rows,
            num_unparsed=self.faults.num_unparsed,
            checkpoints=find_checkpoints(run_dir),
            tracker_step=layout.read_pointer(run_dir).step,
            num_attempts=1 + len({restart.row for restart in self._restarts} - {0}),
            num_lost_steps=self._num_lost(steps),
            num_disordered_rows=int(is_disordered.sum()),
            span_s=float(np.ptp(np.concatenate(clocks))) if sum(map(len, clocks)) > 1 else None,
        )

    def _wait(self, number: int, row: Mapping[str, Any]) -> None:
        rows, cells = self._waiting.setdefault(tuple(row), ([], []))
        rows.append(number)
        cells.append(list(row.values()))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for keys, (rows, cells) in waiting.items():
            whole: dict[str, NDArray[np.float64]] = {}
            row_ids = np.array(rows, dtype=np.int32)
            for key, column in zip(keys, zip(*cells, strict=True), strict=False):
                values = _plain_numbers(column)
                if values is None:
                    self._unpack(rows, key, column)
                    numbers = [as_number(cell) for cell in column]
                    found = [index for index, number in enumerate(numbers) if number is not None]
                    values = np.array([numbers[index] for index in found], dtype=np.float64)
                    if len(found) < len(rows):
                        self._put(row_ids[found], {key: values})
                        continue
                whole[key] = values
            self._put(row_ids, whole)
        if self._waiting:
            self._flush()

    def _unpack(self, rows: list[int], key: str, column: tuple[Any, ...]) -> None:
        for number, cell in zip(rows, column, strict=True):
            if isinstance(cell, dict):
                self._wait(number, flat(cell, f"{key}/", separator="/"))

    def _put(self, rows: Rows, columns: dict[str, NDArray[np.float64]]) -> None:
        """Beyond the limit sets of keys get a column for each key instead of one for each set, and no new key any."""
        if not len(rows) or not columns:
            return
        table = self._tables.get(tuple(columns))
        if table is None and len(columns) > 1 and self._num_columns + len(columns) > MAX_COLUMNS:
            for key, values in columns.items():
                self._put(rows, {key: values})
            return
        if table is None and len(self._names | columns.keys()) > MAX_COLUMNS:
            return
        if table is None:
            table = self._tables[tuple(columns)] = _Table(columns={key: array("d") for key in columns})
            self._num_columns += len(columns)
            self._names |= columns.keys()
        table.rows.frombytes(rows.tobytes())
        for key, values in columns.items():
            table.columns[key].frombytes(values.tobytes())

    def _series(self, steps: Ints, is_disordered: NDArray[np.bool_]) -> dict[str, Series]:
        """Also marks rows that repeat a step: a validation row has other keys, a restart explains what it repeats."""
        is_stale = self._stale_rows(steps)
        segments = np.searchsorted([restart.row for restart in self._restarts], np.arange(len(steps)), side="right")
        homes: dict[str, list[int]] = {}
        tables = list(self._tables.values())
        for place, table in enumerate(tables):
            for name in table.columns:
                homes.setdefault(name, []).append(place)
            rows = np.frombuffer(table.rows, dtype=np.int32)
            if bool(np.any(np.diff(steps[rows]) <= 0)):
                order = rows[np.lexsort((rows, steps[rows], segments[rows]))]
                same = (np.diff(steps[order]) == 0) & (np.diff(segments[order]) == 0)
                is_disordered[order[1:][same]] = True
        selections: dict[tuple[int, ...], _Selection] = {}
        series = {}
        for key, (name, factor) in _chosen(homes).items():
            at = tuple(homes[name])
            if at not in selections:
                rows = np.concatenate([np.frombuffer(tables[place].rows, dtype=np.int32) for place in at])
                selections[at] = _select(rows, steps, is_stale)
            values = _joined([tables[place].columns.pop(name) for place in at])
            picks = selections[at].picks
            values = values if picks is None else values[picks]
            if factor != 1:
                values = values * factor
            if len(values):
                series[key] = Series(selections[at].steps, values)
        return series

    def _segments(self) -> Iterator[tuple[int, int, Restart]]:
        """(first row, last + 1, the restart that began it); the first of all began at step 0."""
        starts = [Restart(0, 0), *self._restarts]
        stops = [*(restart.row for restart in self._restarts), self.num_rows]
        return ((restart.row, stop, restart) for restart, stop in zip(starts, stops, strict=True))

    def _stale_rows(self, steps: Ints) -> NDArray[np.bool_]:
        """Rows of steps beyond a later rewind."""
        is_stale = np.zeros(len(steps), dtype=np.bool_)
        limit = _END
        for start, stop, restart in reversed(list(self._segments())):
            is_stale[start:stop] = steps[start:stop] > limit
            if restart.rewinds and restart.step is not None:
                limit = min(limit, restart.step)
        return is_stale

    def _num_lost(self, steps: Ints) -> int:
        """Steps between where the run was when it ended and where it went on, over all restarts."""
        num_lost = reached = 0
        for start, stop, restart in self._segments():
            begin = restart.step
            if begin is None:
                begin = int(steps[start]) - 1 if stop > start else reached
            num_lost += max(0, reached - begin) if start > 0 else 0
            reached = max(begin, int(steps[start:stop].max(initial=0)))
        return num_lost


def _chosen(names: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Our key -> (column, factor to our unit): the column that has its name already, else the first."""
    chosen: dict[str, tuple[str, float]] = {}
    for name in names:
        key, factor = canonical(name)
        if key not in chosen or name == key:
            chosen[key] = (name, factor)
    return chosen


def _joined(parts: list["array[float]"]) -> NDArray[np.float64]:
    arrays = [np.frombuffer(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _plain_numbers(cells: tuple[Any, ...]) -> NDArray[np.float64] | None:
    """The cells as an array where all are numbers."""
    if type(cells[0]) not in (int, float):
        return None
    try:
        values = np.array(cells)
    except ValueError:  # lists of unequal lengths
        return None
    return values.astype(np.float64, copy=False) if values.dtype.kind in "iuf" and values.ndim == 1 else None


def _select(rows: Rows, steps: Ints, is_stale: NDArray[np.bool_]) -> _Selection:
    own_steps = steps[rows]
    if not is_stale[rows].any() and bool(np.all(np.diff(own_steps) > 0)):
        return _Selection(own_steps, None)
    picks = np.lexsort((rows, own_steps))
    picks = picks[~is_stale[rows[picks]]]
    picks = picks[np.append(np.diff(own_steps[picks]) > 0, True)] if len(picks) else picks
    return _Selection(own_steps[picks], picks)
