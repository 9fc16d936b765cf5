"""Rows of a log as columns of numbers, and what counts of them in the end.

R rows in the order in which they were written.
"""

from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint import layout
from trainer.report.readers.checkpoints import find_checkpoints
from trainer.report.readers.parsing import as_number, as_step, canonical
from trainer.report.run_log import RunLog, Series
from trainer.runtime.json_lines import JsonLines, flat

BLOCK_ROWS = 16384
MAX_COLUMNS = 20000
"""More different keys than any run has; a damaged file must not make one array for each of its
rows.
"""
CLOCK = "ts"
"""The column with the wall time of a row in seconds, where a format has one; it is no metric."""
_ABSENT_BITS = 0x7FF8_0000_0000_0ABC
_ABSENT = float(np.int64(_ABSENT_BITS).view(np.float64))
"""Stands where a row has no number: a NaN that no log holds."""
_END = np.iinfo(np.int64).max

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int32]


@dataclass
class _Table:
    """The rows with the same keys. Arrays grow in place: one block of memory each, and no holes
    of small ones.
    """

    columns: dict[str, "array[float]"]
    rows: "array[int]" = field(default_factory=lambda: array("i"))
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    top: tuple[int, int] = (0, -1)
    """The number of restarts before the newest row, and the largest step since the last of
    these.
    """

    def flush(self) -> None:
        """Rows that wait become arrays many at a time, which makes it fast."""
        for column, cells in zip(
            self.columns.values(), zip(*self.waiting, strict=True), strict=False
        ):
            column.frombytes(_numbers(cells).tobytes())
        self.waiting.clear()

    def pop(self, name: str) -> tuple[Rows, Floats]:
        """Rows and numbers of a column; its memory is free afterwards."""
        rows, values = np.frombuffer(self.rows, np.int32), np.frombuffer(self.columns.pop(name))
        is_there = values.view(np.int64) != _ABSENT_BITS
        return (rows, values) if is_there.all() else (rows[is_there], values[is_there])


class Frame:
    """Takes rows one by one.

    Numbers inside strings count (`parse_number`), nested objects become `outer/inner`, everything
    else is left out.
    """

    def __init__(self) -> None:
        self.num_unparsed = 0
        self._steps = array("q")
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._names: set[str] = set()
        self._num_columns = 0
        self._restarts: list[int] = []
        """The rows before which they were."""
        self._rewinds: list[tuple[int, int]] = []
        self._top = -1
        """The largest step since the last restart."""
        self._reached = 0
        """The largest step that counts so far, or where the last restart went on."""
        self._is_open = False
        """A restart has not said where it went on."""
        self._num_lost_steps = self._num_disordered_rows = 0

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
        """A row that was logged at `step`, a cell or JSON value; without one it counts as
        unparsed.
        """
        if (at := as_step(step)) is None:
            self.num_unparsed += 1
            return
        if self._is_open:
            self._go_on(at - 1)
        is_repeated = self._put(
            flat(row, separator="/") if dict in map(type, row.values()) else row, at
        )
        self._num_disordered_rows += is_repeated or at < self._top
        self._top, self._reached = max(self._top, at), max(self._reached, at)
        self._steps.append(at)
        if len(self._steps) % BLOCK_ROWS == 0:
            self._flush()

    def restart(self, step: int | None = None, *, rewinds: bool = False) -> None:
        """What is added from here on was trained after a restart from `step`; None = the step
        before the next row's.

        `rewinds`: earlier rows of later steps no longer count, even those that are not written
        again.
        """
        self._restarts.append(self.num_rows)
        self._top, self._is_open = -1, step is None
        if step is not None:
            self._go_on(step)
            self._rewinds += [(self.num_rows, step)] * rewinds

    def _go_on(self, step: int) -> None:
        self._num_lost_steps += max(0, self._reached - step) if self.num_rows else 0
        self._reached, self._is_open = step, False

    def log(self, path: Path, source: str, run_dir: Path, **facts: Any) -> RunLog:
        """Sorted series under our keys, of each step the last row, and nothing that a rewind took
        back.

        `facts`: the fields of `RunLog` that the format tells besides.
        """
        self._flush()
        clocks = [table.pop(CLOCK)[1] for table in self._tables.values() if CLOCK in table.columns]
        known: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_unparsed": self.num_unparsed,
            "checkpoints": find_checkpoints(run_dir),
            "tracker_step": layout.read_pointer(run_dir).step,
            "num_attempts": 1 + len({*self._restarts} - {0}),
            "num_lost_steps": self._num_lost_steps,
            "num_disordered_rows": self._num_disordered_rows,
            "span_s": float(np.ptp(np.concatenate(clocks))) if sum(map(len, clocks)) > 1 else None,
        }
        return RunLog(path=path, source=source, series=self._series(), **(known | facts))

    def _put(self, row: Mapping[str, Any], step: int) -> bool:
        """Whether rows with the same keys had the step since the last restart: a validation row has
        others.

        Beyond the limit sets of keys get a column for each key instead of one for each set, and no
        new key any.
        """
        keys = tuple(row)
        table = self._tables.get(keys)
        if table is None and len(keys) > 1 and self._num_columns + len(keys) > MAX_COLUMNS:
            return True in [self._put({key: cell}, step) for key, cell in row.items()]
        if table is None:
            if len(self._names.union(keys)) > MAX_COLUMNS:
                return False
            table = self._tables[keys] = _Table({key: array("d") for key in keys})
            self._num_columns += len(keys)
            self._names.update(keys)
        table.rows.append(len(self._steps))
        table.waiting.append(tuple(row.values()))
        place, top = (len(self._restarts), step), table.top
        table.top = max(place, top)
        return place <= top

    def _flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def _series(self) -> dict[str, Series]:
        homes: dict[str, list[_Table]] = {}
        for table in self._tables.values():
            for name in table.columns:
                homes.setdefault(name, []).append(table)
        series: dict[str, Series] = {}
        all_steps = np.array(self._steps, np.int64)
        is_stale = self._stale_rows(all_steps)
        rows, picks, steps, is_whole = (
            np.empty(0, np.int32),
            np.empty(0, np.intp),
            np.empty(0, np.int64),
            False,
        )
        ours = {name: canonical(name) for name in homes}
        places = {
            key: place for place, key in enumerate(dict.fromkeys(key for key, _ in ours.values()))
        }
        # Keys as the log has them; a column that has our name comes before its mirrors in other
        # units.
        for name in sorted(homes, key=lambda name: (places[ours[name][0]], ours[name][0] != name)):
            key, factor = ours[name]
            if key in series:
                continue
            parts = [table.pop(name) for table in homes[name]]
            own_rows, values = map(_joined, zip(*parts, strict=True))
            # else it shares the steps of the metric before it
            if not np.array_equal(own_rows, rows):
                rows, steps = own_rows, all_steps[own_rows]
                is_whole = not is_stale[rows].any() and bool((np.diff(steps) > 0).all())
                if not is_whole:
                    picks = np.lexsort((rows, steps))
                    picks = picks[~is_stale[rows[picks]]]
                    picks = picks[np.diff(steps[picks], append=_END) > 0]
                    steps = steps[picks]
            if len(steps):
                values = values if is_whole else values[picks]
                series[key] = Series(steps, values if factor == 1 else values * factor)
        return series

    def _stale_rows(self, steps: Ints) -> NDArray[np.bool_]:
        """Rows of steps beyond a later rewind."""
        is_stale = np.zeros(len(steps), np.bool_)
        stop, limit = len(steps), _END
        for row, step in [*reversed(self._rewinds), (0, 0)]:
            is_stale[row:stop] = steps[row:stop] > limit
            stop, limit = row, min(limit, step)
        return is_stale


def _joined(parts: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    """A copy only where there is more than one: a copy of each column would cost a fifth of the
    memory.
    """
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _numbers(cells: tuple[Any, ...]) -> Floats:
    if type(cells[0]) in (int, float):
        with suppress(ValueError):  # lists of unequal lengths
            values = np.array(cells)
            if values.dtype.kind in "iuf" and values.ndim == 1:
                return values.astype(np.float64, copy=False)
    return np.array([_ABSENT if (number := as_number(cell)) is None else number for cell in cells])
