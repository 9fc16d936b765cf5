"""A plain store of log rows: key -> steps and values."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import layout
from trainer.runtime.json_lines import flat
from trainer.tools.report.readers.checkpoints import find_checkpoints
from trainer.tools.report.readers.parsing import as_number, as_step, canonical
from trainer.tools.report.run_log import RunLog, Series

MAX_KEYS = 20_000
"""More keys than any run has: a damaged file must not make a column for each of its rows."""
CLOCKS = ("ts", "_timestamp")
"""Columns with the wall time in seconds; they are no metrics."""
ELAPSED, STEP_TIME = "progress/elapsed_s", "train/time(s)"

Row = dict[str, Any]


class Store:
    """Take rows in the order in which they were written.

    A row most of whose metrics were already logged at later steps is a rewind: training went back,
    and what was logged of this and later steps no longer counts. If the next row continues where
    the row before was, the row is only out of order. Of several values of a step the last counts.
    """

    def __init__(self) -> None:
        self.num_unparsed = self.num_rows = self.num_lost_steps = 0
        self.num_attempts = 1
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._last = -1
        self._waiting: tuple[int, Row] | None = None
        """The newest row, which waits for the next one."""

    def add(self, step: Any, row: Any) -> None:
        """Take a row; without a step, or if it is no object, it counts as unparsed.

        Numbers in strings count, nested objects become `outer/inner`, other values are left out.
        """
        at = as_step(step)
        if at is None or not isinstance(row, dict):
            self.num_unparsed += 1
            return
        self._settle(at)
        self._waiting = (at, row)
        self.num_rows += 1

    def rewind(self, step: int) -> None:
        """Take back all values of later steps: training continued from `step`."""
        self._settle(None)
        self.num_lost_steps += max(0, self._last - step)
        self.num_attempts += bool(self.num_rows)
        self._last = step
        for steps, values in self._columns.values():
            while steps and steps[-1] > step:
                steps.pop()
                values.pop()

    def _settle(self, next_step: int | None) -> None:
        """Store the row that waits, now that the step after it is known."""
        if self._waiting is None:
            return
        (step, row), self._waiting = self._waiting, None
        is_out_of_order = next_step is not None and next_step > self._last
        if step < self._last and not is_out_of_order and self._was_logged_after(step, row):
            self.rewind(step - 1)
        self._last = max(self._last, step)
        if dict in map(type, row.values()):
            row = flat(row, separator="/")
        for key, cell in row.items():
            value = cell if type(cell) is float else as_number(cell)
            if value is None:
                continue
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) == MAX_KEYS:
                    continue
                column = self._columns[key] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(value)

    def _was_logged_after(self, step: int, row: Row) -> bool:
        columns = (self._columns[key][0] for key in row if key in self._columns)
        num_later = sum(bool(steps) and steps[-1] > step for steps in columns)
        return 2 * num_later > len(row)

    def log(self, path: Path, source: str, run_dir: Path, **facts: Any) -> RunLog:
        """Return the log with sorted series under our keys; `facts` are other fields of it."""
        self._settle(None)
        clocks = [np.array(self._columns.pop(key)[1]) for key in CLOCKS if key in self._columns]
        series = self._series()
        if ELAPSED in series:
            clocks.append(series[ELAPSED].values)
            series.setdefault(STEP_TIME, _differences(series[ELAPSED]))
        known: dict[str, Any] = {
            "num_attempts": self.num_attempts,
            "span_s": float(np.ptp(clocks[0])) if clocks else None,
        }
        return RunLog(
            path=path,
            source=source,
            series=series,
            num_rows=self.num_rows,
            num_unparsed=self.num_unparsed,
            num_lost_steps=self.num_lost_steps,
            checkpoints=find_checkpoints(run_dir),
            tracker_step=layout.read_pointer(run_dir).step,
            **(known | facts),
        )

    def _series(self) -> dict[str, Series]:
        series: dict[str, Series] = {}
        ours = {name: canonical(name) for name in self._columns}
        # A column with our name comes before its mirrors in other units.
        for name in sorted(ours, key=lambda name: ours[name][0] != name):
            key, factor = ours[name]
            steps, values = self._columns.pop(name)
            if key not in series and steps:
                series[key] = _rising(Series(np.array(steps, np.int64), np.array(values) * factor))
        return {key: series[key] for key, _ in ours.values() if key in series}


def _rising(points: Series) -> Series:
    """Sort points by step; of each step the last one counts."""
    if (np.diff(points.steps) > 0).all():
        return points
    points = points[np.argsort(points.steps, kind="stable")]
    return points[np.append(np.diff(points.steps) > 0, True)]


def _differences(elapsed: Series) -> Series:
    """Return the seconds of a step; the clock may begin again at a restart."""
    step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
    return Series(elapsed.steps[1:], step_s)[step_s >= 0]
