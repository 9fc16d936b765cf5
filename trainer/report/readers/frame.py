"""Rows of a log as columns of numbers, and what counts of them in the end.

R rows in the order in which they were written.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.report.readers.parsing import as_number
from trainer.report.run_log import Series

BLOCK_ROWS = 16384
MAX_COLUMNS = 20000
"""More different keys than any run has; a damaged file must not make one array for each of its rows."""

Rename = Callable[[str], tuple[str, float]]
"""The name in the log -> our key, and the factor to its unit."""


@dataclass(frozen=True)
class Restart:
    """From `row` on the run went on after `step`; None = after the step before that row's.

    `rewinds`: earlier rows of later steps no longer count, even those that were not written again.
    """

    row: int
    step: int | None = None
    rewinds: bool = False


@dataclass(frozen=True)
class Resolved:
    series: dict[str, Series]
    num_disordered_rows: int
    num_lost_steps: int


@dataclass(frozen=True)
class _Column:
    """Columns that are logged together share the arrays of `rows`, block by block."""

    rows: list[NDArray[np.int32]] = field(default_factory=list)
    values: "array[float]" = field(default_factory=lambda: array("d"))
    """Grows in place: one block of memory at the end, and no holes of small ones."""


class Frame:
    """Takes rows one by one, and turns a block of them with equal keys into arrays at once, which makes it fast.

    Numbers inside strings count (`parse_number`), nested objects become `outer/inner`, everything else is left out.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._blocks: dict[tuple[str, ...], tuple[list[int], list[list[Any]]]] = {}
        self._num_waiting = 0
        self._columns: dict[str, _Column] = {}
        self.restarts: list[Restart] = []

    @property
    def num_rows(self) -> int:
        return len(self._steps)

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        keys = tuple(row)
        block = self._blocks.get(keys)
        if block is None:
            block = self._blocks[keys] = ([], [])
        block[0].append(len(self._steps))
        block[1].append(list(row.values()))
        self._steps.append(step)
        self._num_waiting += 1
        if self._num_waiting == BLOCK_ROWS:
            self._flush()

    def restart(self, step: int | None = None, *, rewinds: bool = False) -> None:
        """What is added from here on was trained after a restart from `step`."""
        self.restarts.append(Restart(self.num_rows, step, rewinds))

    def take(self, name: str) -> NDArray[np.float64]:
        """A column's values in the order of the file; it is no metric and gives no series."""
        self._flush()
        return np.array(self._columns.pop(name, _Column()).values)

    def resolve(self, rename: Rename) -> Resolved:
        """Sorted series under our keys: of each step the last row, and nothing that a rewind took back."""
        self._flush()
        steps = np.frombuffer(self._steps, dtype=np.int64) if self._steps else np.empty(0, dtype=np.int64)
        restarts = sorted(self.restarts, key=lambda restart: restart.row)
        is_stale = _stale_rows(steps, restarts)
        segments = np.searchsorted([restart.row for restart in restarts], np.arange(len(steps)), side="right")
        num_values, num_repeats = np.zeros((2, len(steps)), dtype=np.int32)
        selections: dict[tuple[int, ...], _Selection] = {}
        kept: list[list[NDArray[np.int32]]] = []  # an identity is one as long as its array lives
        series: dict[str, Series] = {}
        for name, key, factor in self._sources(rename):
            column = self._columns.pop(name)
            identity = tuple(map(id, column.rows))
            if identity not in selections:
                kept.append(column.rows)
                selections[identity] = _select(column.rows, steps, is_stale)
            selection = selections[identity]
            for rows in column.rows:
                num_values[rows] += 1
            num_repeats[selection.repeats(segments)] += 1
            series[key] = selection.series(column.values, factor)
        series = {key: points for key, points in series.items() if len(points)}
        # A validation row gives the epoch and the clock of its step again: a repeat has nothing new.
        is_disordered = _backward_rows(steps, restarts) | ((num_repeats > 0) & (num_repeats == num_values))
        return Resolved(series, int(is_disordered.sum()), _num_lost(steps, restarts))

    def _sources(self, rename: Rename) -> list[tuple[str, str, float]]:
        """(column, key, factor), one column a key: the one that has its name already, else the first."""
        chosen: dict[str, tuple[str, str, float]] = {}
        for name in self._columns:
            key, factor = rename(name)
            if key not in chosen or name == key:
                chosen[key] = (name, key, factor)
        return list(chosen.values())

    def _flush(self) -> None:
        blocks, self._blocks, self._num_waiting = self._blocks, {}, 0
        for keys, (rows, cells) in blocks.items():
            row_ids = np.array(rows, dtype=np.int32)
            for key, column in zip(keys, zip(*cells, strict=True), strict=False):
                self._append(key, row_ids, column)

    def _append(self, key: str, rows: NDArray[np.int32], cells: tuple[Any, ...]) -> None:
        values = _plain_numbers(cells)
        if values is not None:
            self._put(key, rows, values)
            return
        nested: dict[str, tuple[list[int], list[Any]]] = {}
        numbers = [as_number(cell) for cell in cells]
        found = [index for index, number in enumerate(numbers) if number is not None]
        for index, cell in enumerate(cells):
            if isinstance(cell, dict) and key.count("/") < 16:
                for inner, value in cell.items():
                    inner_rows, inner_cells = nested.setdefault(f"{key}/{inner}", ([], []))
                    inner_rows.append(int(rows[index]))
                    inner_cells.append(value)
        if found:
            found_rows = rows if len(found) == len(rows) else rows[found]
            self._put(key, found_rows, np.array([numbers[index] for index in found], dtype=np.float64))
        for name, (inner_rows, inner_cells) in nested.items():
            self._append(name, np.array(inner_rows, dtype=np.int32), tuple(inner_cells))

    def _put(self, key: str, rows: NDArray[np.int32], values: NDArray[np.float64]) -> None:
        if key in self._columns or len(self._columns) < MAX_COLUMNS:
            column = self._columns.setdefault(key, _Column())
            column.rows.append(rows)
            column.values.frombytes(values.tobytes())


def _plain_numbers(cells: tuple[Any, ...]) -> NDArray[np.float64] | None:
    """The cells as an array where all are numbers."""
    if type(cells[0]) not in (int, float):
        return None
    try:
        values = np.array(cells)
    except ValueError:  # lists of unequal lengths
        return None
    return values.astype(np.float64, copy=False) if values.dtype.kind in "iuf" and values.ndim == 1 else None


@dataclass(frozen=True)
class _Selection:
    """Which values of a set of columns with the same rows count, in the order of their steps."""

    steps: NDArray[np.int64]
    picks: NDArray[np.intp] | None
    """Into the values; None = all, as they are."""
    repeated: NDArray[np.int32]
    """Rows that a later row of the same step replaced,"""
    replaced_by: NDArray[np.int32]
    """and those later rows."""

    def series(self, logged: "array[float]", factor: float) -> Series:
        values = np.frombuffer(logged)
        values = values if self.picks is None else values[self.picks]
        if factor != 1:
            values *= factor
        return Series(self.steps, values)

    def repeats(self, segments: NDArray[np.intp]) -> NDArray[np.int32]:
        """Later rows of a step within one segment: no restart explains them."""
        return self.replaced_by[segments[self.repeated] == segments[self.replaced_by]]


def _select(row_blocks: list[NDArray[np.int32]], steps: NDArray[np.int64], is_stale: NDArray[np.bool_]) -> _Selection:
    rows = np.concatenate(row_blocks)
    own_steps = steps[rows]
    nothing = np.empty(0, dtype=np.int32)
    if not is_stale[rows].any() and bool(np.all(np.diff(own_steps) > 0)):
        return _Selection(own_steps, None, nothing, nothing)
    picks = np.lexsort((rows, own_steps))
    picks = picks[~is_stale[rows[picks]]]
    is_last = np.ones(len(picks), dtype=np.bool_)
    is_last[:-1] = np.diff(own_steps[picks]) > 0
    replaced = np.flatnonzero(~is_last)
    return _Selection(
        own_steps[picks[is_last]],
        picks[is_last],
        rows[picks[replaced]],
        rows[picks[np.minimum(replaced + 1, len(picks) - 1)]],
    )


def _stale_rows(steps: NDArray[np.int64], restarts: list[Restart]) -> NDArray[np.bool_]:
    """Rows of steps beyond a later rewind."""
    is_stale = np.zeros(len(steps), dtype=np.bool_)
    limit, end = np.iinfo(np.int64).max, len(steps)
    for restart in reversed(restarts):
        is_stale[restart.row : end] = steps[restart.row : end] > limit
        end = restart.row
        if restart.rewinds and restart.step is not None:
            limit = min(limit, restart.step)
    is_stale[:end] = steps[:end] > limit
    return is_stale


def _backward_rows(steps: NDArray[np.int64], restarts: list[Restart]) -> NDArray[np.bool_]:
    """Rows whose step lies before that of an earlier row of the same segment."""
    is_backward = np.zeros(len(steps), dtype=np.bool_)
    bounds = [0, *(restart.row for restart in restarts), len(steps)]
    for start, end in pairwise(bounds):
        is_backward[start:end] = steps[start:end] < np.maximum.accumulate(steps[start:end])
    return is_backward


def _num_lost(steps: NDArray[np.int64], restarts: list[Restart]) -> int:
    """Steps between where the run was when it ended and where it went on, over all restarts."""
    num_lost, reached, start = 0, 0, 0
    for index, restart in enumerate(restarts):
        reached = max(reached, int(steps[start : restart.row].max(initial=0)))
        end = restarts[index + 1].row if index + 1 < len(restarts) else len(steps)
        step = restart.step
        if step is None:
            step = int(steps[restart.row]) - 1 if end > restart.row else reached
        if restart.row > 0:
            num_lost += max(0, reached - step)
        reached, start = step, restart.row
    return num_lost
