"""The console: a progress bar on a terminal, else one plain line per row, both with the time left of the whole run."""

import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import Row
from trainer.tracking.run_info import RunInfo

FIELDS: dict[str, Callable[[float], str]] = {
    "train/loss": lambda value: f"loss {value:.4f}",
    "train/lr(1e-3)": lambda value: f"lr {value * 1e-3:.2e}",
    "train/grad_norm": lambda value: f"grad_norm {value:.2f}",
    "train/reward_mean": lambda value: f"reward {value:.3f}",
    "train/accuracy_mean": lambda value: f"accuracy {value:.3f}",
    "throughput/train/tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "train/time(s)": lambda value: f"{value:.2f} s",
}
"""What a line shows of a training row, in this order; of a validation row it shows every `val/` key."""
ETA_WINDOW_STEPS = 100


class ConsoleBackend(Backend):
    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._total_steps = info.total_steps
        self._eta = _Eta(info.total_steps)
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

    def log(self, row: Row) -> None:
        data, step = row.data, row.step
        place = f"step {step}/{self._total_steps}"
        val_parts = [f"{key} {_number(value)}" for key, value in data.items() if key.startswith("val/")]
        train_parts = [show(data[key]) for key, show in FIELDS.items() if key in data]
        if val_parts:
            self._print(" | ".join([place, *val_parts]))
        if train_parts:
            if data.get("optim/skipped_steps"):
                train_parts.append(f"skipped {data['optim/skipped_steps']:g}")
            eta_s = self._eta.update(step, data.get("train/time(s)"))
            if eta_s is not None:
                train_parts.append(f"eta {timedelta(seconds=round(eta_s))}")
            self._show(step, place, train_parts)

    def close(self, exit_code: int) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _show(self, step: int, place: str, parts: list[str]) -> None:
        if self._progress is None:
            self._print(" | ".join([place, *parts]))
        else:
            self._progress.update(self._progress.task_ids[0], completed=step, description=" | ".join(parts))
            self._progress.refresh()

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False)


class _Eta:
    """Seconds left of the run, from the wall time of the last steps, validation and saving included."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._marks: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW_STEPS)

    def update(self, step: int, step_time_s: float | None) -> float | None:
        """`step_time_s` stands in as long as there is only one step to go by."""
        if self._marks and step <= self._marks[-1][0]:
            self._marks.clear()
        self._marks.append((step, time.monotonic()))
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        pace_s = (last_s - first_s) / (last_step - first_step) if last_step > first_step else step_time_s
        return None if pace_s is None else pace_s * max(0, self._total_steps - step)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
