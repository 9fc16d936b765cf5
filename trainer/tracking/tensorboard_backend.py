"""TensorBoard event files in `run_dir/tensorboard`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.metrics import METRICS
from trainer.tracking import tensorboard_events
from trainer.tracking.backend import Backend, Held
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo


def where(info: RunInfo) -> str:
    return f"tensorboard --logdir={info.run_dir}/tensorboard --port=6006"


Layout = dict[str, dict[str, list[str | list[str]]]]


def layout() -> Layout:
    """Of the tab "Custom Scalars", from the table of metrics: its groups, training and validation in one chart."""
    charts: dict[str, list[str]] = {}
    for key, metric in METRICS.items():
        if metric.every in ("step", "eval") and "<" not in key:
            charts.setdefault(key.removeprefix("train/").removeprefix("val/"), []).append(key)
    sections: Layout = {}
    for name, keys in charts.items():
        tags: list[str] = [f"^{re.escape(key)}$" for key in keys]
        sections.setdefault(METRICS[keys[0]].group, {})[name] = ["Multiline", tags]
    return sections


class TensorboardBackend(Backend):
    """A later attempt, and a rollback, purge the steps they repeat, so that each step is drawn once."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._directory = info.run_dir / "tensorboard"
        self._writer: Any = None
        self._held = Held({})

    def open(self) -> None:
        self._held = Held(tensorboard_events.last_steps(self._directory))
        self.rewind(self._info.resume_step)
        self._writer.add_custom_scalars(layout())
        for row in self._info.earlier_rows():
            self._write(row)

    def log(self, row: MetricsRow) -> None:
        self._write(row)
        # A killed attempt must not lose steps before its checkpoint.
        self._writer.flush()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """As text, in a table of Markdown."""
        lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        cells = ([cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """A file of its own, whose first entry takes back the later steps of those before it."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        self._held.rewind(step)
        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)

    def close(self, exit_code: int) -> None:
        self._writer.close()

    def _write(self, row: MetricsRow) -> None:
        for key, value in self._held.missing(row).items():
            self._writer.add_scalar(key, value, row.step, walltime=row.ts)
