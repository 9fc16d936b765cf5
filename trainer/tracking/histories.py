"""`training_history.csv` and `validation_history.csv`: one row per epoch, from 1, for spreadsheets
and quick looks.

`loss` of training is the mean over the epoch's tokens, of validation the last one in the epoch.
Rewards, accuracies, latencies and budget violations that a user logs appear as mean and standard
deviation over the epoch's steps. Values that are not finite are left out; `nonfinite_steps` counts
the losses among them.
"""

import csv
import io
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.errors import EXIT_DONE
from trainer.metrics import METRICS
from trainer.metrics.words import Metric
from trainer.runtime.files import atomic_write
from trainer.tracking import metrics_file
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

logger = logging.getLogger(__name__)

FILE_NAMES = {"train": "training_history.csv", "val": "validation_history.csv"}
PREFIXES = ("train/", "val/", "eval/")
SPREAD = ("reward", "accuracy", "latency")


@dataclass(frozen=True)
class Column:
    """Of a history: the metric as `_plain` names it, and what becomes of its values."""

    name: str
    metric: str
    reduce: Callable[[Sequence[float]], float]
    factor: float

    @classmethod
    def of(cls, metric: Metric) -> "Column":
        name, way = metric.csv.split()
        return cls(name, _bare(metric.key), REDUCED[way], metric.factor)


def _sum(values: Sequence[float]) -> float:
    """Of counts a count."""
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)


def _bare(key: str) -> str:
    """In lower case and without the phase: `Train/Reward_Mean` becomes `reward_mean`."""
    name = key.lower()
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


REDUCED = {"sum": _sum, "last": lambda values: values[-1], "median": statistics.median}
"""How the values of an epoch's steps become one."""
_SHOWN_METRICS = [metric for metric in METRICS.values() if metric.csv]
COLUMNS = {
    "train": [Column.of(metric) for metric in _SHOWN_METRICS if metric.every != "eval"],
    "val": [Column.of(metric) for metric in _SHOWN_METRICS if metric.every == "eval"],
}
"""Of each history the columns that are one metric, in the order of the table."""
USED = {
    *("loss", "total_valid_token_count", "budget_violation_rate"),
    *(f"{name}{part}" for name in SPREAD for part in ("", "_mean", "_std")),
    *(column.metric for columns in COLUMNS.values() for column in columns),
}
"""Metrics that a line is made of; of a run without such a metric it lacks the column."""
SHOWN = ("loss", "steps", "tokens", "seconds")

Cells = dict[str, float]


class HistoryBackend(Backend):
    """Rewrites both files when an epoch has ended and at the end of the attempt.

    A later attempt and a rollback compute them anew from `metrics.jsonl`: neither leaves a trace.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._epochs = _Epochs()
        self._has_logged = False

    def open(self) -> None:
        for row in self._info.earlier_rows():
            self._epochs.add(row)
        self._write()

    def log(self, row: MetricsRow) -> None:
        if self._epochs.is_ended_by(row):
            self._write()
            if self._has_logged:  # else an earlier attempt said it
                self._say()
        self._has_logged = True
        self._epochs.add(row)

    def rewind(self, step: int) -> None:
        self._epochs = _Epochs()
        for row in metrics_file.read_rows(self._info.metrics_path):
            if row.step <= step:  # later ones are still to come
                self._epochs.add(row)

    def close(self, exit_code: int) -> None:
        self._write()
        if exit_code == EXIT_DONE:
            self._say()

    def _write(self) -> None:
        for kind, name in FILE_NAMES.items():
            atomic_write(self._info.run_dir / name, _table(self._epochs.history(kind)))

    def _say(self) -> None:
        """The newest epoch in a line."""
        for cells in self._epochs.history("train")[-1:]:
            parts = [f"{name} {cells[name]:.6g}" for name in SHOWN if name in cells]
            parts += [
                f"val/loss {val['loss']:.6g}"
                for val in self._epochs.history("val")[-1:]
                if "loss" in val
            ]
            logger.info("epoch %d: %s", cells["epoch"], " | ".join(parts))


class _Epochs:
    """Keeps the rows of the epoch under way, and a line of each one before it."""

    def __init__(self) -> None:
        self._epoch = 1
        self._rows: dict[str, dict[int, Mapping[str, float]]] = {kind: {} for kind in FILE_NAMES}
        self._ended: dict[str, list[Cells]] = {kind: [] for kind in FILE_NAMES}

    def is_ended_by(self, row: MetricsRow) -> bool:
        return row.kind == "train" and _epoch(row) > self._epoch

    def add(self, row: MetricsRow) -> None:
        """In order of steps; a validation belongs to the epoch of the training step before it."""
        if self.is_ended_by(row):
            self._ended = {kind: self.history(kind) for kind in FILE_NAMES}
            self._rows = {kind: {} for kind in FILE_NAMES}
            self._epoch = _epoch(row)
        if row.kind in FILE_NAMES:
            rows = self._rows[row.kind]
            rows[row.step] = {**rows.get(row.step, {}), **_plain(row.data)}

    def history(self, kind: str) -> list[Cells]:
        """Lines of all epochs, that of the one under way included."""
        rows = self._rows[kind]
        if not rows:
            return list(self._ended[kind])
        line = _training_line(rows) if kind == "train" else _validation_line(rows)
        return [*self._ended[kind], {"epoch": self._epoch, **line}]


def _epoch(row: MetricsRow) -> int:
    """Counted from 1; all of a run is the first epoch where `progress/epoch` is not logged."""
    return int(row.data.get("progress/epoch", 0)) + 1


def _plain(data: Mapping[str, float]) -> dict[str, float]:
    """What is used, under bare names."""
    return {name: value for key, value in data.items() if (name := _bare(key)) in USED}


def _training_line(rows: Mapping[int, Mapping[str, float]]) -> Cells:
    values = list(rows.values())
    losses = [
        (row["loss"], row.get("total_valid_token_count", 1)) for row in values if "loss" in row
    ]
    finite = [(loss, num_tokens) for loss, num_tokens in losses if math.isfinite(loss)]
    cells: Cells = {}
    if num_tokens := sum(num_tokens for _, num_tokens in finite):
        cells["loss"] = math.fsum(loss * num_tokens for loss, num_tokens in finite) / num_tokens
    cells |= _spreads(values)
    cells |= {"steps": len(rows), "last_step": max(rows), **_columns("train", values)}
    return cells | {"nonfinite_steps": len(losses) - len(finite)}


def _validation_line(rows: Mapping[int, Mapping[str, float]]) -> Cells:
    step = max(rows)
    last = rows[step]
    cells: Cells = {"loss": last["loss"]} if "loss" in last else {}
    return cells | {**_spreads([last]), "step": step, **_columns("val", [last])}


def _columns(kind: str, rows: Sequence[Mapping[str, float]]) -> Cells:
    values = {column: _finite(rows, column.metric) for column in COLUMNS[kind]}
    return {
        column.name: column.reduce(found) * column.factor
        for column, found in values.items()
        if found
    }


def _spreads(rows: Sequence[Mapping[str, float]]) -> Cells:
    """Means and standard deviations: those logged, else those of the values over the steps."""
    cells: Cells = {}
    for name in SPREAD:
        values, means, stds = (_finite(rows, key) for key in (name, f"{name}_mean", f"{name}_std"))
        if means or values:
            cells[f"{name}_mean"] = statistics.fmean(means or values)
        if stds:
            cells[f"{name}_std"] = statistics.fmean(stds)
        elif len(means or values) > 1:
            cells[f"{name}_std"] = statistics.pstdev(means or values)
    if rates := _finite(rows, "budget_violation_rate"):
        cells["budget_violation_rate"] = statistics.fmean(rates)
    return cells


def _finite(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _table(lines: Sequence[Cells]) -> str:
    """CSV with a column for everything any epoch has, in the order of the fullest epoch."""
    if not lines:
        return ""
    columns = max((list(line) for line in lines), key=len)
    columns += [name for line in lines for name in line if name not in columns]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(columns)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()
