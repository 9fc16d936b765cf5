"""From a proven checkpoint to the live parts of a run, whether this trainer or verl wrote it."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from trainer.checkpoint import layout, shards, verl
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.rollback import Rollbacks
from trainer.protocols import LoopState, Position, Stateful
from trainer.runtime import seeding
from trainer.runtime.distributed import World

logger = logging.getLogger(__name__)


class TrainBatches(Protocol):
    """Where the run stands in its data, and what of it goes into `data.pt`."""

    last_step: int

    @property
    def position(self) -> Position: ...

    def state_dict(self) -> dict[str, Any]: ...

    def rewind(self, position: Position, *, skipped_steps: frozenset[int]) -> None: ...


class Guard(Stateful, Protocol):
    """What a rollback asks of it beyond its state."""

    episodes: list[tuple[int, int]]

    @property
    def best_step(self) -> int | None: ...

    def after_rollback(self, forgotten: Mapping[str, Any], rollbacks: Rollbacks) -> None: ...


class Meter(Stateful, Protocol):
    def lose_steps(self, count: int) -> None: ...


class Tracking(Stateful, Protocol):
    def rewind(self, step: int) -> None: ...

    def event(self, kind: str, step: int, message: str, level: str = "info") -> None: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class RunState:
    """Everything that survives a restart."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    train_batches: TrainBatches
    guard: Guard
    loop: Stateful
    meter: Meter
    tracking: Tracking | None
    """On the main rank only."""
    schedule: Mapping[str, Any]


def load_state(checkpoint: CheckpointInfo, state: RunState, *, contents: list[str], world: World) -> None:
    """Take over `contents` (model, optimizer, extra). The position in the data was decided before (`start`).

    Raises `ConfigError` if the checkpoint belongs to another model or is not what it promises.
    """
    if checkpoint.manifest is None:
        _load_foreign(checkpoint, state, contents)
        return
    manifest = checkpoint.manifest
    where = {"world_size": manifest.world_size, "num_shards": manifest.num_shards}
    shards.load_model(state.model, checkpoint.path, **where)
    if "optimizer" in contents:
        parts = shards.read_optimizer(checkpoint.path, **where)
        shards.load_optimizer(state.model, state.optimizer, parts, checkpoint.path)
    if "extra" in contents:
        _load_extra(checkpoint, manifest, state, world)


def saved_loop(checkpoint: CheckpointInfo) -> LoopState:
    """What the loop remembered; as at the start of a run where a checkpoint has nothing of it or is damaged."""
    loop = LoopState()
    if checkpoint.manifest is not None:
        with suppress(shards.CorruptShardError):  # found, and told, when the checkpoint is proven
            extra = shards.read_torch(checkpoint.path / layout.extra_file(checkpoint.manifest.world_size, 0))
            loop.load_state_dict(extra.get("loop", loop.state_dict()))
    return loop


def _load_extra(checkpoint: CheckpointInfo, manifest: Manifest, state: RunState, world: World) -> None:
    is_same_size = manifest.world_size == world.size
    saved_rank = world.rank if is_same_size else 0
    extra = shards.read_torch(checkpoint.path / layout.extra_file(manifest.world_size, saved_rank))
    if changes := schedule_changes(extra["lr_scheduler"], state.schedule):
        logger.warning("the learning rate follows another schedule from here on: %s", changes)
    state.guard.load_state_dict(extra["guard"])
    if "loop" in extra:  # not in checkpoints of the first version
        state.loop.load_state_dict(extra["loop"])
    if "meter" in extra:
        state.meter.load_state_dict(extra["meter"])
    if is_same_size:
        seeding.set_rng_state(extra["rng"], world.device)
    if state.tracking is not None:
        state.tracking.load_state_dict(extra["tracking"])
    if state.train_batches.position != own_position(manifest):
        raise RuntimeError(f"the data would go on from {state.train_batches.position}, not where {checkpoint.path} was")


def _load_foreign(checkpoint: CheckpointInfo, state: RunState, contents: list[str]) -> None:
    """verl's: parameters, moments and position; the rate follows the step, random numbers are keyed by it."""
    found = verl.open_checkpoint(checkpoint.path)
    num_shards = verl.count_shards(found)
    shards.load_model(state.model, found.path, world_size=found.world_size, num_shards=num_shards)
    if "optimizer" in contents:
        names = [name for name, _ in state.model.named_parameters()]
        parts = verl.optimizer_parts(found, num_shards=num_shards, param_names=names)
        shards.load_optimizer(state.model, state.optimizer, parts, found.path)
    if "extra" in contents and (note := verl.schedule_note(found)):
        logger.warning("%s", note)


def own_position(manifest: Manifest) -> Position:
    return Position(manifest.step, manifest.epoch, manifest.samples_consumed)


def schedule_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`key: saved -> now` for every key that differs, empty if none does."""
    return ", ".join(f"{key}: {saved.get(key)} -> {value}" for key, value in now.items() if saved.get(key) != value)
