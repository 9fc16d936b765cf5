"""The console: one plain line per row."""

from datetime import timedelta

from trainer import metrics
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow

JOINED = ("±", "at step")
"""Parts that belong to the part before them."""


class ConsoleBackend(Backend):
    is_inline = True

    def log(self, row: MetricsRow) -> None:
        """Print the metrics that have a console format, in the order of their table, and those of
        the user's own.
        """
        parts = [
            _format(metric.console, row.data[key] * metric.factor)
            for key, metric in metrics.METRICS.items()
            if metric.console and key in row.data
        ]
        parts += [f"{key} {value:.4g}" for key, value in row.data.items() if not metrics.find(key)]
        if not parts:
            return
        total_steps = self.info.total_steps
        line = f"step {row.step}" if total_steps is None else f"step {row.step}/{total_steps}"
        for part in parts:
            line += f" {part}" if part.startswith(JOINED) else f" | {part}"
        if num_skipped := row.data.get("optim/skipped_steps"):
            line += f" | skipped {num_skipped:g}"
        print(line, flush=True)


def _format(text: str, value: float) -> str:
    duration = timedelta(seconds=round(value)) if "{duration}" in text else ""
    return text.format(value, duration=duration)
