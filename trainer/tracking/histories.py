"""`training_history.csv` and `validation_history.csv`: one row per epoch, from 1.

`loss` is the mean over the epoch's tokens in training, and the last one of the epoch in validation.
Other columns are metrics with a `csv` entry in the table of metrics, and the mean of each metric of
the user's own (`Train/Reward_Mean` is `reward_mean`). Values that are not finite are left out;
`nonfinite_steps` counts the losses among them.
"""

import csv
import io
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from trainer import metrics
from trainer.errors import EXIT_DONE
from trainer.runtime.files import atomic_write
from trainer.tracking import metrics_file
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow

logger = logging.getLogger(__name__)
FILE_NAMES = {"train": "training_history.csv", "val": "validation_history.csv"}
REDUCED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "last": lambda values: values[-1],
    "median": statistics.median,
}
"""How the values of an epoch's steps become one."""
STEP, TOKENS = "step", "train/total_valid_token_count"
Values = dict[str, list[float]]
"""The values of an epoch by metric."""
Cells = dict[str, float]


class HistoryBackend(Backend):
    """Writes both files from `metrics.jsonl` when an epoch has ended and when the attempt ends, so
    that neither restarts nor rollbacks leave a trace.
    """

    close_timeout_s = 120.0
    _epoch: int | None = None
    """The epoch under way, once this attempt has made a step."""

    def log(self, row: MetricsRow) -> None:
        if row.kind != "train":
            return
        ended, self._epoch = self._epoch, _epoch_of(row)
        if ended is not None and ended < self._epoch:
            self._write(ended)

    def close(self, exit_code: int) -> None:
        self._write(self._epoch if exit_code == EXIT_DONE else None)

    def _write(self, ended: int | None) -> None:
        """Write both files, and a line about the epoch that has ended."""
        histories = epoch_histories(metrics_file.read_rows(self.info.metrics_path))
        for kind, name in FILE_NAMES.items():
            atomic_write(self.info.run_dir / name, _table(histories[kind]))
            for line in histories[kind]:
                if line["epoch"] == ended:
                    logger.info("%s: %s", kind, _in_words(line))


def epoch_histories(rows: Iterable[MetricsRow]) -> dict[str, list[Cells]]:
    """Return the lines of both histories. A validation belongs to the epoch of the training step
    before it; without `progress/epoch` all of a run is the first epoch.
    """
    epoch = 1
    epochs: dict[str, dict[int, Values]] = {"train": {}, "val": {}}
    for row in rows:
        if row.kind == "train":
            epoch = _epoch_of(row)
            values = epochs["train"].setdefault(epoch, {})
        elif row.kind == "val":  # the last validation of the epoch counts
            values = epochs["val"][epoch] = {}
        else:
            continue
        values.setdefault(STEP, []).append(row.step)
        for key, value in row.data.items():
            if _is_shown(key):
                values.setdefault(key, []).append(value)
    return {
        kind: [{"epoch": number, **_line(kind, values)} for number, values in found.items()]
        for kind, found in epochs.items()
    }


def _epoch_of(row: MetricsRow) -> int:
    return int(row.data.get("progress/epoch", 0)) + 1


def _in_words(cells: Cells) -> str:
    return " | ".join(f"{name} {value:.6g}" for name, value in cells.items())


@cache
def _is_shown(key: str) -> bool:
    metric = metrics.find(key)
    return metric is None or bool(metric.csv) or key in ("train/loss", "val/loss", TOKENS)


def _line(kind: str, values: Values) -> Cells:
    losses = values.pop(f"{kind}/loss", [])
    weights = values.get(TOKENS, [])
    if len(weights) != len(losses):
        weights = [1.0] * len(losses)
    finite = [(loss, n) for loss, n in zip(losses, weights, strict=True) if math.isfinite(loss)]
    cells: Cells = {}
    if num_tokens := sum(n for _, n in finite):
        cells["loss"] = math.fsum(loss * n for loss, n in finite) / num_tokens
    steps = values.pop(STEP)
    numbers = {key: list(filter(math.isfinite, found)) for key, found in values.items()}
    for key, found in numbers.items():
        if found and metrics.find(key) is None:
            cells[_bare(key)] = statistics.fmean(found)
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


def _bare(key: str) -> str:
    """Return the key in lower case and without its phase."""
    return re.sub("^(train|val|eval)/", "", key.lower())


def _table(lines: Sequence[Cells]) -> str:
    """Return CSV with a column for everything any epoch has."""
    columns = dict.fromkeys(name for line in lines for name in line)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    if lines:
        writer.writeheader()
        writer.writerows(lines)
    return buffer.getvalue()
