"""What of a run survives a restart, by name (floor 3)."""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.checkpoint.state import ModelShards, OptimizerShards, Stateful, WeightBuffers
from trainer.data.loader import TrainLoader
from trainer.guard.guard import Guard
from trainer.model.experts import Routers
from trainer.monitor.meter import Meter
from trainer.optim.clip import Optimizer
from trainer.optim.schedule import LrSchedule
from trainer.progress import LoopState
from trainer.runtime import seeding
from trainer.runtime.distributed import World
from trainer.tracking import Tracking

logger = logging.getLogger(__name__)


def stateful_parts(
    world: World,
    model: PreTrainedModel,
    routers: Routers,
    optimizer: Optimizer,
    lr_schedule: LrSchedule,
    batches: TrainLoader,
    guard: Guard,
    loop: LoopState,
    meter: Meter,
    tracking: Tracking | None,
) -> dict[str, Stateful]:
    """All that is saved, loaded and rolled back. A new part is a line here, and its two methods.

    A checkpoint from before a part was there leaves it as it begins.
    """
    return {
        "model": ModelShards(model),
        "optimizer": OptimizerShards(model, optimizer),
        "data": batches,
        "lr_scheduler": RateState(lr_schedule, batches),
        "rng": GeneratorState(world.device),
        "buffers": WeightBuffers(model),
        "routers": routers,
        "guard": guard,
        "loop": loop,
        "meter": meter,
        **({} if tracking is None else {"tracking": tracking}),
    }


class RateState:
    """The rate follows the step and the configuration: what is saved tells readers, and a resume what has changed."""

    def __init__(self, schedule: LrSchedule, batches: TrainLoader) -> None:
        self._schedule, self._batches = schedule, batches

    def state_dict(self) -> dict[str, Any]:
        return {**self._schedule.state_dict(), "last_epoch": self._batches.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        now = self._schedule.state_dict()
        changes = [f"{key}: {state_dict.get(key)} -> {now[key]}" for key in now if state_dict.get(key) != now[key]]
        if changes:
            logger.warning("the learning rate follows another schedule from here on: %s", ", ".join(changes))


class GeneratorState:
    """Of this rank; each step seeds them anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        return seeding.rng_state(self._device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        seeding.set_rng_state(state_dict, self._device)
