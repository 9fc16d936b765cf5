"""The console: a progress bar on a terminal, else one plain line per row."""

import sys
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainer.metrics import METRICS
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

FIELDS = {
    key: (metric.console, metric.factor) for key, metric in METRICS.items() if metric.console
} | {
    "train/reward_mean": ("reward {:.3f}", 1),
    "train/accuracy_mean": ("accuracy {:.3f}", 1),
}
"""What a line shows of a row, in this order: of our own metrics, and of those that callers
often log.
"""
JOINED = ("±", "at step")
"""What belongs to the part before it."""


class ConsoleBackend(Backend):
    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._total_steps = info.total_steps
        self._progress: Progress | None = None

    def open(self) -> None:
        if sys.stdout.isatty():
            # No refresh thread: a data worker forked while it holds a lock would hang.
            self._progress = Progress(
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(file=sys.stdout),
                auto_refresh=False,
            )
            self._progress.add_task(
                "", total=self._total_steps, completed=max(0, self._info.resume_step)
            )
            self._progress.start()

    def log(self, row: MetricsRow) -> None:
        data, step = row.data, row.step
        parts = [
            _shown(words, data[key] * factor)
            for key, (words, factor) in FIELDS.items()
            if key in data
        ]
        if not parts:
            return
        if data.get("optim/skipped_steps"):
            parts.append(f"skipped {data['optim/skipped_steps']:g}")
        place = f"step {step}" if self._total_steps is None else f"step {step}/{self._total_steps}"
        line = _joined([place, *parts])
        if self._progress is None or row.kind != "train":
            self._print(line)
        else:
            self._progress.update(self._progress.task_ids[0], completed=step, description=line)
            self._progress.refresh()

    def close(self, exit_code: int) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False)


def _shown(words: str, value: float) -> str:
    return words.format(
        value, duration=timedelta(seconds=round(value)) if "{duration}" in words else ""
    )


def _joined(parts: list[str]) -> str:
    line = parts[0]
    for part in parts[1:]:
        line += f" {part}" if part.startswith(JOINED) else f" | {part}"
    return line
