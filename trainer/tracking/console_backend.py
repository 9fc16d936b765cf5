"""The console: a progress bar on a terminal, else one plain line per row."""

import sys
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

FIELDS: dict[str, Callable[[float], str]] = {
    "train/loss": lambda value: f"loss {value:.4f}",
    "train/lr(1e-3)": lambda value: f"lr {value * 1e-3:.2e}",
    "train/grad_norm": lambda value: f"grad_norm {value:.2f}",
    "train/reward_mean": lambda value: f"reward {value:.3f}",
    "train/accuracy_mean": lambda value: f"accuracy {value:.3f}",
    "throughput/train/tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "train/time(s)": lambda value: f"{value:.2f} s",
    "progress/eta_s": lambda value: f"eta {timedelta(seconds=round(value))}",
    "val/loss": lambda value: f"val/loss {value:.4f}",
    "val/loss_stderr": lambda value: f"± {value:.4f}",
    "val/token_accuracy": lambda value: f"accuracy {value:.3f}",
    "val/best_loss": lambda value: f"best {value:.4f}",
    "val/best_step": lambda value: f"at step {value:.0f}",
    "val/samples": lambda value: f"{value:,.0f} samples",
}
"""What a line shows of a row, in this order."""
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
            self._progress.add_task("", total=self._total_steps, completed=max(0, self._info.resume_step))
            self._progress.start()

    def log(self, row: MetricsRow) -> None:
        data, step = row.data, row.step
        parts = [show(data[key]) for key, show in FIELDS.items() if key in data]
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


def _joined(parts: list[str]) -> str:
    line = parts[0]
    for part in parts[1:]:
        line += f" {part}" if part.startswith(JOINED) else f" | {part}"
    return line
