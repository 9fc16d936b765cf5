"""TensorBoard event files in `run_dir/tensorboard`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.tracking.run_info import RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardBackend:
    """A later attempt purges the steps it repeats, so that each step is drawn once."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # From scratch the row of step 0, a validation before training, is repeated too.
        purge_step = self._info.resume_step + 1 if self._info.resume_step > 0 else 0
        self._writer = SummaryWriter(str(self._info.run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        assert self._writer is not None
        for key, value in data.items():
            self._writer.add_scalar(key, value, step)
        # A killed attempt must not lose steps before its checkpoint: nobody would write them again.
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        assert self._writer is not None
        self._writer.close()
