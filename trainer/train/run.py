"""The `Run`: all parts of a run, and the states that survive a restart, by name.

`trainer/train/start/main.py` builds it, and the functions of this package use it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.shards import StateDict
from trainer.checkpoint.state import ModelShards, OptimizerShards, Stateful, WeightBuffers
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.optim.clip import Optimizer
from trainer.optim.schedule import LrSchedule
from trainer.runtime import seeding
from trainer.runtime.distributed import World
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.progress import LoopState
from trainer.runtime.signals import StopRequest
from trainer.tracking import Tracking
from trainer.tracking.row_losses import SampleLosses
from trainer.train.guard import Guard
from trainer.train.meter import Meter
from trainer.train.parts import (
    LossTerms,
    Norms,
    Part,
    RouterLoad,
    RowLosses,
    SourceLosses,
    blocks_of,
)

logger = logging.getLogger(__name__)


def is_due(every: int, step: int) -> bool:
    """Return True if an action that happens every `every` steps is due after `step` (from 1).

    With -1 the action happens only at the end of the run, so the result is False.
    """
    return every > 0 and step % every == 0


@dataclass
class Run:
    """The parts of one run on one rank."""

    world: World
    model: PreTrainedModel
    optimizer: Optimizer
    lr_schedule: LrSchedule
    batches: TrainLoader
    validation_batches: ValidationBatches | None
    guard: Guard
    loop: LoopState
    meter: Meter
    location: Callable[[int], str]
    """Returns the location (`file:line`) of a sample, given its id."""
    tracking: Tracking | None
    """Set on the main rank only."""
    save_freq: int
    test_freq: int
    seed: int
    max_norm: float
    """The gradient norm to which gradients are clipped."""
    hang_timeout_s: float
    stop: StopRequest
    heartbeat: Heartbeat
    checkpoints: CheckpointManager = field(init=False)
    """Saves and loads the other parts, so it is set last."""
    is_stopping: bool = field(default=False, init=False)
    """True if any rank had been asked to stop by the last reduction."""
    is_save_requested: bool = field(default=False, init=False)
    parts: dict[str, Part] = field(init=False)
    """The parts that act in every step, in this order."""

    def __post_init__(self) -> None:
        self.parts = {name: make(self) for name, make in PARTS.items()}

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters.

        They are cached, because walking through the modules in every step would delay the host.
        """
        return list(chain.from_iterable(self.blocks.values()))

    @cached_property
    def blocks(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters by block."""
        return blocks_of(self.model)

    def stateful_parts(self) -> dict[str, Stateful]:
        """Return everything that is saved, loaded and rolled back, by name.

        The state of a part must be equal on all ranks, which each save checks, unless its class
        sets `state_of` (`trainer.runtime.progress`) or `is_sharded`. If a checkpoint lacks a part,
        the part keeps its initial state.
        """
        return {
            "model": ModelShards(self.model),
            "optimizer": OptimizerShards(self.model, self.optimizer),
            "data": self.batches,
            "lr_scheduler": RateState(self.lr_schedule, self.batches),
            "rng": seeding.GeneratorState(self.world.device),
            "buffers": WeightBuffers(self.model),
            "loop": self.loop,
            **self.parts,
        }

    def tell(
        self,
        kind: str,
        step: int,
        message: str,
        level: str,
    ) -> None:
        """Record an event, and print it if it is a warning.

        Ranks other than the main rank only print warnings.
        """
        if self.tracking is not None:
            self.tracking.event(kind, step, message, level)
            self.tracking.flush()
        elif level == "warn":
            logger.warning("step %d: %s", step, message)

    def log_rows(self, step: int, losses: SampleLosses) -> None:
        if self.tracking is not None:
            self.tracking.log_rows(step, losses, self.location)

    def log(
        self,
        row: Mapping[str, float],
        step: int,
        kind: str | None = None,
    ) -> None:
        if self.tracking is not None:
            self.tracking.log(row, step, kind)


PARTS: dict[str, Callable[[Run], Part]] = {
    "routers": lambda run: RouterLoad(run.model, run.world.device),
    "sources": lambda run: SourceLosses(),
    "terms": lambda run: LossTerms(run.model),
    "rows": lambda run: RowLosses(run.log_rows),
    "guard": lambda run: run.guard,
    "norms": lambda run: Norms(run.blocks, num_replicas=run.world.num_replicas),
    "meter": lambda run: run.meter,
}
"""Maps each part's name to a function that makes the part from the run, in the order in which parts
act. The meter comes last, because it stops the step's timer. Add your part on every rank, before
the run is built.
"""


class RateState:
    """The saved learning-rate schedule.

    A run always computes the rate from its step and configuration; on resume, it warns if the
    schedule has changed.
    """

    def __init__(self, schedule: LrSchedule, batches: TrainLoader) -> None:
        self._schedule = schedule
        self._batches = batches

    def state_dict(self) -> StateDict:
        # torch's schedulers call their step counter `last_epoch`
        return {**self._schedule.state_dict(), "last_epoch": self._batches.step}

    def load_state_dict(self, state_dict: StateDict) -> None:
        now = self._schedule.state_dict()
        changes = [key for key in now if state_dict[key] != now[key]]
        if changes:
            logger.warning(
                "the learning-rate schedule has changed: %s",
                ", ".join(f"{key}: {state_dict[key]} -> {now[key]}" for key in changes),
            )
