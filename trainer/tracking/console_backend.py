"""Prints a line for some steps and for every validation. A terminal also shows a progress bar."""

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.tracking import metrics
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow

JOINED = ("±", "at step")
"""A part of a line that begins with this text follows the previous part without a separator."""


class ConsoleBackend(Backend):
    """Prints metrics to stdout: in a terminal below a progress bar, in a file as plain lines with
    the time.

    A line appears every `log_every` steps, for every validation, and for every skipped step.
    """

    is_inline = True
    _progress: Progress | None = None
    _has_shown_step = False
    _num_skipped = 0.0

    def open(self) -> None:
        if not sys.stdout.isatty():
            return
        # no refresh thread: a loader worker that is forked while the thread holds a lock would hang
        self._progress = Progress(
            BarColumn(20),
            TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stdout),
            auto_refresh=False,
        )
        self._progress.add_task(
            "", total=self.info.total_steps, completed=max(0, self.info.resume_step)
        )
        self._progress.start()

    def close(self, exit_code: int) -> None:
        if self._progress is not None:
            self._progress.stop()

    def log(self, row: MetricsRow) -> None:
        """Print the metrics that have a console format, in the order of the table, then the user's
        own metrics.
        """
        parts = []
        for key, metric in metrics.METRICS.items():
            if metric.console and key in row.data:
                value = row.data[key] * metric.factor
                duration = timedelta(seconds=round(value)) if metric.unit == "s" else ""
                parts.append(metric.console.format(value, duration=duration))
        parts += [f"{key} {value:.4g}" for key, value in row.data.items() if not metrics.find(key)]
        if not parts:
            return
        num_skipped = row.data.get("optim/skipped_steps", 0.0)
        is_skipped = num_skipped > self._num_skipped
        self._num_skipped = max(self._num_skipped, num_skipped)
        if num_skipped:
            parts.append(f"skipped {num_skipped:g}")
        total_steps = self.info.total_steps
        is_step = row.kind == "train"
        line = f"step {row.step}" if total_steps is None else f"step {row.step}/{total_steps}"
        for part in parts:
            line += f" {part}" if part.startswith(JOINED) else f" | {part}"
        if self._progress is None:
            line = f"{time.strftime('%H:%M:%S')} {line}"
        elif is_step:
            (task,) = self._progress.task_ids
            self._progress.update(
                task,
                completed=row.step,
                description=line,
                refresh=True,
            )
        if not is_step or is_skipped or self._is_due(row.step):
            print(line, flush=True)

    def _is_due(self, step: int) -> bool:
        """Return whether the line of a step is due. The lines of the first and the last step always
        are.
        """
        is_first = not self._has_shown_step
        self._has_shown_step = True
        return is_first or step % self.info.log_every == 0 or step == self.info.total_steps
