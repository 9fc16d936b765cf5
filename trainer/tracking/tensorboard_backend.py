"""Logs to TensorBoard event files in `run_dir/tensorboard`."""

import uuid
from typing import Any

from trainer.tracking.backend import ContinuedBackend
from trainer.tracking.metrics_file import MetricsRow

FLUSH_S = 5


class TensorboardBackend(ContinuedBackend):
    """A later attempt or a rollback purges the steps that it repeats, so each step appears once."""

    modules = ("tensorboard", "torch.utils.tensorboard")
    install = "'tensorboard>=2.18'"
    _writer: Any = None

    def where(self) -> str:
        return f"tensorboard --logdir={self.info.run_dir}/tensorboard --port=6006"

    def connect(self, run_id: str | None) -> str:
        has_files = any((self.info.run_dir / "tensorboard").glob("*tfevents*"))
        return run_id if run_id and has_files else uuid.uuid4().hex

    def send(self, row: MetricsRow) -> None:
        for key, value in row.data.items():
            self._writer.add_scalar(key, value, row.step, walltime=row.ts)

    def take_back(self, step: int) -> bool:
        """Begin a new file, whose first entry removes the steps after `step` in earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        directory = str(self.info.run_dir / "tensorboard")
        self._writer = SummaryWriter(directory, purge_step=step + 1, flush_secs=FLUSH_S)
        return True

    def disconnect(self, exit_code: int) -> None:
        self._writer.close()
