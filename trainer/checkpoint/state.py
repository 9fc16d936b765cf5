"""The state that survives a restart: a dictionary of named parts, which save, resume and rollback
use alike.

The name of a part decides where it is kept: `model` and `optimizer` each in a file of shards, `data`
in a file that belongs to no rank, every other part in the extra state of each rank.

On another number of ranks, a resume gives every rank the extra state of rank 0. That is right for a
part whose state is equal on all ranks, which each save checks, and for one whose state on rank 0
counts. A class that sets `state_of = OWN` has a different state on each rank: it continues on the
same ranks only. A class that sets `is_sharded` has DTensors by name, which any number of ranks
shards again.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from trainer.checkpoint import layout, shards
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import ConfigError
from trainer.model.weights import bytes_of
from trainer.runtime.distributed import World
from trainer.runtime.progress import ALL, MAIN, OWN

logger = logging.getLogger(__name__)
APART = ("model", "optimizer", "data")
"""Parts that have their own files."""
SEEDED = ("rng",)
"""Parts that differ by rank and may get lost: each step seeds them again."""


class Stateful(Protocol):
    """A part that survives a restart. Its class may set `state_of` (default `ALL`, see
    `trainer.runtime.progress`) and `is_sharded` (default False).
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


State = Mapping[str, Stateful]


@dataclass(frozen=True)
class Shards:
    """A saved sharded part: its `state_dict` on each rank of one whole copy."""

    directory: Path
    parts: Sequence[Mapping[str, Any]]


class ModelShards:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return shards.model_state(self.model)

    def load_state_dict(self, state_dict: Shards) -> None:
        shards.load_model(self.model, state_dict.parts, state_dict.directory)


class OptimizerShards:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return shards.optimizer_state(self.model, self.optimizer)

    def load_state_dict(self, state_dict: Shards) -> None:
        shards.load_optimizer(self.model, self.optimizer, state_dict.parts, state_dict.directory)


class WeightBuffers:
    """Buffers that belong to the weights. They are not among the shards: every rank holds them
    whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return shards.weight_buffers(self.model)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in shards.weight_buffers(self.model).items():
            buffer.copy_(state_dict[name])


def rank_state(state: State, step: int) -> dict[str, Any]:
    """Return the extra state of this rank after `step`. Raises `ConfigError` for a sharded part
    whose state is not tensors by name.
    """
    found: dict[str, Any] = {"step": step}
    for name, part in state.items():
        if name not in APART:
            found[name] = part.state_dict()
            if is_sharded(part):
                found[name] = _compact_tensors(name, found[name])
    return found


def _compact_tensors(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the state of the part '{name}' cannot be saved: '{key}' is a "
                f"{type(value).__name__}, and a part with is_sharded holds tensors by name.\n"
                f"Fix: return a tensor, or keep the value in another part"
            )
    return {key: shards.compact(value) for key, value in state.items()}


def require_resumable(extra: Mapping[str, Any], state: State, world: World) -> None:
    """Raise `ConfigError` on all ranks for an extra state that another number of ranks could not
    load. Collective.

    `extra`: the result of `rank_state` on this rank.
    """
    common, sharded = {}, []
    for name in sorted(extra.keys() & state.keys() - {*SEEDED}):
        leaves = tree_leaves(extra[name])
        if not is_sharded(state[name]) and any(isinstance(leaf, DTensor) for leaf in leaves):
            sharded.append(name)
        elif _state_of(state[name]) == ALL:
            common[name] = _digest(_without_shards(extra[name]))
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, (common, sharded))
    expected, _ = reports[0]
    for rank, (digests, found_sharded) in enumerate(reports):
        if found_sharded:
            raise ConfigError(
                f"the state of the part '{found_sharded[0]}' cannot be saved: it holds a sharded "
                f"tensor (DTensor).\nFix: set is_sharded = True on the class, and let its "
                f"state_dict map names to tensors"
            )
        names = expected.keys() | digests.keys()
        if different := sorted(name for name in names if expected.get(name) != digests.get(name)):
            raise ConfigError(
                f"the state of the part '{different[0]}' cannot be saved: it is not the same on "
                f"rank 0 and rank {rank}, and a resume on another number of ranks loads that of "
                f"rank 0.\nFix: make it equal, or set state_of on the class: {OWN!r} if each rank "
                f"needs its own state, {MAIN!r} if that of rank 0 counts"
            )


def _state_of(part: Stateful) -> str:
    return getattr(part, "state_of", ALL)


def is_sharded(part: Stateful) -> bool:
    """Return True if the state of a part is sharded over the ranks."""
    return getattr(part, "is_sharded", False)


def _without_shards(value: Any) -> Any:
    """Return the state without the DTensors of a sharded part, which differ by rank."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if not isinstance(item, DTensor)}


def _digest(value: Any) -> str:
    """Return a digest that is equal for equal nested containers of tensors and plain values."""
    digest = hashlib.blake2b(digest_size=16)
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0]}
    for path, leaf in sorted(leaves.items()):
        digest.update(f"{path} {type(leaf).__name__} ".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            digest.update(bytes_of(leaf.detach()))
        else:
            digest.update(f"{leaf!r} ".encode())
    return digest.hexdigest()


def load_state(
    checkpoint: CheckpointInfo, state: State, *, contents: Sequence[str], world: World
) -> None:
    """Load `contents` (model, optimizer, extra) of a verified checkpoint.

    Raises `ConfigError` if it belongs to another model.
    """
    assert checkpoint.manifest is not None, "it is committed"
    path, manifest = checkpoint.path, checkpoint.manifest
    for name, file_of in (("model", layout.model_file), ("optimizer", layout.optim_file)):
        if name in ("model", *contents):
            ranks = range(manifest.num_shards)
            files = [path / file_of(manifest.world_size, rank) for rank in ranks]
            state[name].load_state_dict(Shards(path, [shards.read_torch(file) for file in files]))
    if "extra" not in contents:
        return
    is_same_size = manifest.world_size == world.size
    rank = world.rank if is_same_size else 0
    extra = shards.read_torch(path / layout.extra_file(manifest.world_size, rank))
    extra["data"] = shards.read_torch(path / layout.DATA)
    num_shards = manifest.num_shards
    extra_files = [layout.extra_file(manifest.world_size, shard) for shard in range(num_shards)]
    for name, part in state.items():
        if name in ("model", "optimizer") or (name in SEEDED and not is_same_size):
            continue
        if name not in extra:
            if part.state_dict():
                logger.info("%s has no state of '%s', which starts empty", path, name)
            continue
        is_own = _state_of(part) == OWN and name not in SEEDED
        if is_own and not (is_same_size and manifest.mesh == world.mesh_sizes):
            raise ConfigError(
                f"{path} holds a state of the part '{name}' for each of its "
                f"{manifest.world_size} ranks ({_described(manifest.mesh)}), which the "
                f"{world.size} ranks of this run ({_described(world.mesh_sizes)}) cannot load.\n"
                f"Fix: continue on the same ranks, or start a new run from its weights: another "
                f"trainer.experiment_name, model.partial_pretrain={path}/huggingface"
            )
        if is_sharded(part):
            # The rows of one rank may be in the files of several.
            saved = [shards.read_torch(path / file)[name] for file in extra_files]
            extra[name] = shards.cut_again(part.state_dict(), saved, path)
        part.load_state_dict(extra[name])


def _described(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items())
