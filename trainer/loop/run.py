"""What a run is made of (floor 3): `trainer/run/main.py` makes the parts, the functions of this package use them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from trainer.checkpoint.manager import CheckpointManager
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.guard.evidence import EvidenceKeeper
from trainer.guard.guard import Guard
from trainer.model.experts import Routers
from trainer.monitor.meter import Meter
from trainer.monitor.roll_detail import RollDetail
from trainer.optim.clip import Optimizer
from trainer.optim.schedule import LrSchedule
from trainer.progress import LoopState
from trainer.runtime.distributed import World
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest
from trainer.tracking import Tracking


@dataclass(frozen=True)
class Cadence:
    """When things happen, in steps counted from 1; a frequency of -1 means only at the end."""

    total_steps: int
    save_freq: int
    test_freq: int
    stop_at: int | None = None
    """The run stops after it, to be continued."""

    def is_save(self, step: int) -> bool:
        return self.save_freq > 0 and step % self.save_freq == 0

    def is_validation(self, step: int) -> bool:
        return self.test_freq > 0 and step % self.test_freq == 0

    def is_stop(self, step: int) -> bool:
        return self.stop_at is not None and step >= self.stop_at


@dataclass
class Run:
    """The parts of one run on one rank."""

    world: World
    model: PreTrainedModel
    routers: Routers
    optimizer: Optimizer
    lr_schedule: LrSchedule
    batches: TrainLoader
    validation_batches: ValidationBatches | None
    guard: Guard
    loop: LoopState
    meter: Meter
    evidence: EvidenceKeeper
    detail: RollDetail
    tracking: Tracking | None
    """On the main rank only."""
    checkpoints: CheckpointManager
    cadence: Cadence
    seed: int
    max_norm: float
    """Gradients are clipped to it."""
    hang_timeout_s: float
    save_timeout_s: float
    stop: StopRequest
    heartbeat: Heartbeat
    is_stopping: bool = field(default=False, init=False)
    """Whether any rank was asked to stop, as of the last time they told each other."""
    is_save_requested: bool = field(default=False, init=False)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained; to walk the modules anew in every step would hold up the host."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def log(self, row: Mapping[str, float], step: int, kind: str | None = None) -> None:
        if self.tracking is not None:
            self.tracking.log(row, step, kind)
