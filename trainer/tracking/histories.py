"""Writes `training_history.csv` and `validation_history.csv`: one row per epoch, counted from 1.

In the training history, `loss` is the mean over the epoch's tokens; in the validation history, it
is the epoch's last validation loss. The other columns are the metrics with a `csv` entry in the
table of metrics, and the mean of each of the user's own metrics (`Train/Reward_Mean` becomes
`reward_mean`). Non-finite values are left out. `nonfinite_steps` counts the steps with a non-finite
loss.
"""

import csv
import io
import logging
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from trainer.errors import EXIT_DONE
from trainer.runtime.files import atomic_write
from trainer.tracking import metrics, metrics_file
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)
FILE_NAMES = {"train": "training_history.csv", "val": "validation_history.csv"}
REDUCED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "last": lambda values: values[-1],
    "median": statistics.median,
}
"""The functions that reduce the values of an epoch's steps to one value."""
STEP = "step"
TOKENS = "train/total_valid_token_count"
Values = dict[str, list[float]]
"""Maps a metric to its values in an epoch."""
Cells = dict[str, float]


class HistoryBackend(Backend):
    """Writes both files when an epoch has ended and when the attempt ends.

    The files are built from `metrics.jsonl`, so restarts and rollbacks leave no trace in them.
    """

    close_timeout_s = 120.0
    _epoch: int | None = None
    """The current epoch; None until this attempt has trained a step."""

    def log(self, row: MetricsRow) -> None:
        if row.kind == "train":
            epoch_before = self._epoch
            self._epoch = _epoch_of(row)
            if epoch_before is not None and epoch_before < self._epoch:
                self._write(epoch_before)

    def close(self, exit_code: int) -> None:
        self._write(self._epoch if exit_code == EXIT_DONE else None)

    def _write(self, ended: int | None) -> None:
        """Write both files, and log a summary of the epoch that has ended."""
        histories = epoch_histories(metrics_file.read_rows(self.info.metrics_path))
        found: dict[str, Cells] = {}
        for kind, lines in histories.items():
            atomic_write(self.info.run_dir / FILE_NAMES[kind], _table(lines))
            found[kind] = next((line for line in lines if line["epoch"] == ended), {})
        if found["train"]:
            summary = f"loss {found['train'].get('loss', math.nan):.4f}"
            if "loss" in found["val"]:
                summary += f" | val/loss {found['val']['loss']:.4f}"
            logger.info("epoch %d | %s | %d steps", ended, summary, found["train"]["steps"])


def epoch_histories(rows: Iterable[MetricsRow]) -> dict[str, list[Cells]]:
    """Return the lines of both histories.

    A validation belongs to the epoch of the training step before it. Without `progress/epoch`,
    the whole run is the first epoch.
    """
    epoch = 1
    epochs: dict[str, dict[int, Values]] = {"train": {}, "val": {}}
    for row in rows:
        if row.kind not in epochs:
            continue
        if row.kind == "train":
            epoch = _epoch_of(row)
        else:  # only the last validation of an epoch counts
            epochs["val"].pop(epoch, None)
        values = epochs[row.kind].setdefault(epoch, defaultdict(list))
        values[STEP].append(row.step)
        for key, value in row.data.items():
            if _is_shown(key):
                values[key].append(value)
    return {
        kind: [_line(kind, epoch, values) for epoch, values in found.items()]
        for kind, found in epochs.items()
    }


def _epoch_of(row: MetricsRow) -> int:
    return int(row.data.get("progress/epoch", 0)) + 1


@cache
def _is_shown(key: str) -> bool:
    metric = metrics.find(key)
    return metric is None or bool(metric.csv) or key in ("train/loss", "val/loss", TOKENS)


def _line(kind: str, epoch: int, values: Values) -> Cells:
    """Return a row of a history: the metrics of an epoch or a validation, reduced as the table of
    metrics defines.

    The loss is the mean over tokens. Non-finite values are left out and counted.
    """
    steps = values.pop(STEP)
    losses = values.pop(f"{kind}/loss", [])
    weights = values.get(TOKENS, [])
    if len(weights) != len(losses):
        weights = [1.0] * len(losses)
    finite = [(loss, n) for loss, n in zip(losses, weights, strict=True) if math.isfinite(loss)]
    numbers = {key: list(filter(math.isfinite, found)) for key, found in values.items()}
    cells: Cells = {"epoch": epoch}
    if num_tokens := sum(n for _, n in finite):
        cells["loss"] = math.fsum(loss * n for loss, n in finite) / num_tokens
    for key, found in numbers.items():
        if found and metrics.find(key) is None:
            name = re.sub("^(train|val|eval)/", "", key.lower())
            cells[name] = statistics.fmean(found)
    if kind == "train":
        cells |= {"steps": len(steps), "last_step": steps[-1]}
    else:
        cells["step"] = steps[-1]
    for metric in metrics.METRICS.values():
        if metric.csv and numbers.get(metric.key):
            name, reduction = metric.csv.split()
            cells[name] = REDUCED[reduction](numbers[metric.key]) * metric.factor
    if kind == "train":
        cells["nonfinite_steps"] = len(losses) - len(finite)
    return cells


def _table(lines: Sequence[Cells]) -> str:
    """Return CSV text with a column for every value that any epoch has."""
    if not lines:
        return ""
    columns = dict.fromkeys(name for line in lines for name in line)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()
