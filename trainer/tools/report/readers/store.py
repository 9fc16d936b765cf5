"""The store that every reader fills with the steps and values of each metric."""

from array import array
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from trainer.runtime.json_lines import flat
from trainer.tools.report.readers.checkpoints import find_checkpoints
from trainer.tools.report.readers.parsing import (
    BOOKKEEPING,
    MAX_STEP,
    as_number,
    as_step,
    canonical,
    guessed,
)
from trainer.tools.report.run_log import RunLog, Series, UnreadableLogError
from trainer.tools.report.vocabulary import is_known

MAX_KEYS = 20_000
"""The limit on metrics, so that a damaged file with new keys in each row cannot fill the memory."""
CLOCKS = ("ts", "_timestamp")
"""Columns that hold wall time in seconds."""
ELAPSED = "progress/elapsed_s"
STEP_TIME = "train/time(s)"

Column = tuple["array[int]", "array[float]"]
"""A metric's steps and values, in the order in which they were written."""


class Store:
    """Collects the rows of a log."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"source": "jsonl", "num_attempts": 1}
        """Fields of the `RunLog` that the reader sets."""
        self.num_rows = 0
        self.num_unparsed = 0
        self._num_lost_steps = 0
        self._last_step = -1
        self._columns: dict[str, Column] = defaultdict(lambda: (array("q"), array("d")))

    def add(self, step: object, row: object) -> None:
        """Add a row; count it as unparsed if it is not a mapping or has no step.

        Strings that hold numbers are converted, and the keys of nested mappings become
        `outer/inner`. Other values are left out.
        """
        at = as_step(step)
        if at is None or not isinstance(row, dict):
            self.num_unparsed += 1
            return
        metrics = {}
        is_nested = dict in map(type, row.values())
        for key, cell in (flat(row, separator="/") if is_nested else row).items():
            number = cell if type(cell) is float else as_number(cell)  # most cells are floats
            if number is not None and key not in BOOKKEEPING:
                metrics[key] = number
        if at < self._last_step:
            # If most metrics have later points, training went back to this step.
            last_steps = [last for key in metrics for last in self._columns[key][0][-1:]]
            if 2 * sum(last > at for last in last_steps) > len(metrics):
                self.rewind(at - 1)
        self._last_step = max(self._last_step, at)
        self.num_rows += 1
        for key, number in metrics.items():
            steps, values = self._columns[key]
            steps.append(at)
            values.append(number)
        if len(self._columns) > MAX_KEYS:
            raise UnreadableLogError(f"more than {MAX_KEYS} metrics")

    def rewind(self, step: int, *, is_restart: bool = True) -> None:
        """Discard the values of later steps: training continued from `step`."""
        self._num_lost_steps += max(0, self._last_step - step)
        self.facts["num_attempts"] += is_restart and self.num_rows > 0
        self._last_step = step
        for steps, values in self._columns.values():
            kept = bisect_right(steps, step)
            del steps[kept:], values[kept:]

    def log(self, path: Path, run_dir: Path) -> RunLog:
        """Return the log that was read from `path`, with the checkpoints in `run_dir`."""
        series = self._series()
        clocks = [series.pop(key) for key in CLOCKS if key in series]
        if ELAPSED in series:
            elapsed = series[ELAPSED]
            clocks.append(elapsed)
            step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
            # a restart resets the clock
            series.setdefault(STEP_TIME, Series(elapsed.steps[1:], step_s)[step_s >= 0])
        return RunLog(
            path=path,
            series=series,
            num_rows=self.num_rows,
            num_unparsed=self.num_unparsed,
            num_lost_steps=self._num_lost_steps,
            checkpoints=find_checkpoints(run_dir),
            span_s=float(np.ptp(clocks[0].values)) if clocks else None,
            **self.facts,
        )

    def _series(self) -> dict[str, Series]:
        """Return the series under our keys, sorted by step. Of several values at one step, the last
        one counts.
        """
        series: dict[str, Series] = {}
        # A column under our own key takes precedence over its mirrors in other units.
        for name in sorted(self._columns, key=lambda name: canonical(name)[0] != name):
            key, factor = canonical(name)
            steps, values = map(np.asarray, self._columns.pop(name))
            order = np.argsort(steps, kind="stable")
            kept = order[np.diff(steps[order], append=MAX_STEP) > 0]
            if len(kept):
                series.setdefault(key, Series(steps[kept], values[kept] * factor))
        unknown = [name for name in series if not is_known(name)]
        for name in sorted(unknown, key=lambda name: "raw" not in name):  # rather than normalised
            ours = guessed(name)
            if ours is not None and ours not in series:
                series[ours] = series.pop(name)
        return series
