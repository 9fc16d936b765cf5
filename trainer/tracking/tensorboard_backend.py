"""TensorBoard event files in `run_dir/tensorboard`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from trainer import metrics
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import NOTHING_SENT, RunInfo


def where(info: RunInfo) -> str:
    return f"tensorboard --logdir={info.run_dir}/tensorboard --port=6006"


Layout = dict[str, dict[str, list[str | list[str]]]]


def layout() -> Layout:
    """Of the tab "Custom Scalars", from the table of metrics: its groups, training and
    validation in one chart.
    """
    return {
        group: {
            title: ["Multiline", [f"^{re.escape(key)}$" for key in keys]]
            for title, keys in charts.items()
        }
        for group, charts in metrics.charts().items()
    }


class TensorboardBackend(Backend):
    """A later attempt, and a rollback, purge the steps they repeat, so that each step is drawn
    once.
    """

    takes_back: ClassVar[bool] = True

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._directory = info.run_dir / "tensorboard"
        self._writer: Any = None

    def open(self) -> None:
        run_file, resume_step = self._info.run_file, self._info.resume_step
        # never switched on before, or removed since
        if not any(self._directory.glob("*tfevents*")):
            run_file.set_last_sent("tensorboard", NOTHING_SENT)
        recorded = run_file.last_sent("tensorboard")
        # also purges what a killed attempt wrote but did not record: those rows are sent again
        self.rewind(resume_step if recorded is None else min(recorded, resume_step))
        self._writer.add_custom_scalars(layout())

    def log(self, row: MetricsRow) -> None:
        self._write(row)
        # A killed attempt must not lose steps before its checkpoint.
        self._writer.flush()

    def log_all(self, rows: Iterable[MetricsRow]) -> None:
        for row in rows:
            self._write(row)
        self._writer.flush()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """As text, in a table of Markdown."""
        lines = [
            [*rows[0]],
            ["---"] * len(rows[0]),
            *([str(value) for value in row.values()] for row in rows),
        ]
        cells = (
            [cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines
        )
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """A file of its own, whose first entry takes back the later steps of those before it."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)

    def close(self, exit_code: int) -> None:
        self._writer.close()

    def _write(self, row: MetricsRow) -> None:
        for key, value in row.data.items():
            self._writer.add_scalar(key, value, row.step, walltime=row.ts)
