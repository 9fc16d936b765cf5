"""The state that survives a restart: a dictionary of named parts for save, resume and rollback.

The name of a part decides which file contains it. `model` and `optimizer` each have a shard file on
each rank, `data` has one file for all ranks, and every other part is in each rank's extra state.

A run that resumes on a different number of ranks loads the extra state of rank 0 on every rank.
This is correct for a part with equal state on all ranks (each save checks this), and for a part
whose state matters only on rank 0. If a class sets `state_of = OWN`, its state differs between
ranks, and the run can resume only with the same number of ranks and the same mesh. If a class sets
`is_sharded`, its state maps names to DTensors, which can be resharded to any number of ranks.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from trainer.checkpoint import layout, shards
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.shards import CorruptShardError, Shards, StateDict
from trainer.config import ConfigError
from trainer.model.weights import bytes_of
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.progress import ALL, MAIN, OWN

logger = logging.getLogger(__name__)
APART = ("model", "optimizer", "data")
"""Parts that are in separate files."""


class Stateful(Protocol):
    """A component whose state is saved in checkpoints and restored from them.

    Its class may set `state_of` (default `ALL`, see `trainer.runtime.progress`) and `is_sharded`
    (default False).
    """

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


State = Mapping[str, Stateful]


def read_shards(checkpoint: CheckpointInfo, file_of: Callable[[int, int], str]) -> Shards:
    """Read the shard files that make up one complete copy of the state.

    `file_of`: the function of `layout` that names the files.
    """
    return Shards.read(checkpoint.path, checkpoint.manifest.shard_files(file_of))


@dataclass(frozen=True)
class ModelShards:
    """The parameters in a checkpoint: {name: this rank's shard as a DTensor}.

    A tied head appears under both of its names, but is written once.
    """

    model: nn.Module

    def state_dict(self) -> dict[str, Tensor]:
        named = shards.saved_parameters(self.model, remove_duplicate=False)
        parameters = dict.fromkeys(named.values())
        cut = next((p for p in parameters if isinstance(p, DTensor)), None)
        pieces = {
            p: shards.compact(p if cut is None else shards.as_shard(p, cut)) for p in parameters
        }
        return {name: pieces[parameter] for name, parameter in named.items()}

    def load_state_dict(self, state_dict: Shards) -> None:
        """Load the parameters.

        Raises `ConfigError` if the checkpoint has parameters that this run does not save, such as
        adapters for layers without adapters in this run.
        """
        named = shards.saved_parameters(self.model, remove_duplicate=False)
        if lost := sorted(state_dict.parts[0].keys() - named.keys()):
            raise ConfigError(
                f"{state_dict.directory} has parameters that this run does not train: "
                f"{lost[0]} ({len(lost)} in total).\n"
                f"Fix: start a new run with trainer.experiment_name=<new name>"
            )
        for name, parameter in shards.saved_parameters(self.model).items():
            may_round = not parameter.requires_grad
            saved = state_dict.entries(name)
            shards.copy_slice(saved, parameter, name, "model.master_dtype", may_round=may_round)


@dataclass(frozen=True)
class OptimizerShards:
    """The optimizer's state: {"state": {parameter name: {step, exp_avg, exp_avg_sq}},
    "param_groups": [{..., "param_names": [...]}]}.

    Loading keeps the learning rates and weight decay of the current configuration.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> StateDict:
        """Return the state by parameter name, and the settings of the groups."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        state = {
            names[parameter]: {key: shards.compact(value) for key, value in values.items()}
            for parameter, values in self.optimizer.state.items()
        }
        groups = []
        for group in self.optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append(settings | {"param_names": [names[p] for p in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Shards) -> None:
        """Copy the slices of this rank into the optimizer, from shards of any number of ranks.

        Raises `CorruptShardError` if a different optimizer saved them.
        """
        directory = state_dict.directory
        states = Shards(directory, [part["state"] for part in state_dict.parts])
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            saved = states.entries(name)
            live = self.optimizer.state[parameter]
            if saved[0].keys() != live.keys():
                raise CorruptShardError(
                    f"{directory.name} was saved by a different optimizer: for '{name}' it has "
                    f"{', '.join(saved[0])}, but {type(self.optimizer).__name__} needs "
                    f"{', '.join(live)}.\nFix: restore optim.name, or {layout.new_run_from(directory)}"
                )
            for key, value in live.items():
                pieces = [entry[key] for entry in saved]
                shards.copy_slice(pieces, value, f"{name}.{key}", "optim.state_dtype")


@dataclass(frozen=True)
class WeightBuffers:
    """The model's persistent buffers. Every rank holds them in full."""

    model: nn.Module

    def state_dict(self) -> StateDict:
        return shards.weight_buffers(self.model)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in shards.weight_buffers(self.model).items():
            buffer.copy_(state_dict[name])


def rank_state(state: State, step: int) -> StateDict:
    """Return the extra state of this rank after `step`."""
    found: StateDict = {"step": step}
    for name, part in state.items():
        if name not in APART:
            found[name] = tree_map(shards.compact, part.state_dict())
    return found


def require_resumable(extra: Mapping[str, Any], state: State) -> None:
    """Raise `ConfigError` on all ranks if a different number of ranks could not load the state.

    `extra`: the result of `rank_state` on this rank. Collective.
    """
    common = {}
    unfit = []
    for name in sorted(extra.keys() & state.keys()):
        if is_sharded(state[name]):
            is_fit = all(isinstance(value, Tensor) for value in extra[name].values())
        else:
            is_fit = not any(isinstance(leaf, DTensor) for leaf in tree_leaves(extra[name]))
        if not is_fit:
            unfit.append(name)
        elif _state_of(state[name]) == ALL:
            common[name] = _digest(extra[name])
    reports = distributed.gather((common, unfit))
    expected, _ = reports[0]
    for rank, (digests, found_unfit) in enumerate(reports):
        if found_unfit:
            raise ConfigError(
                f"the state of the part '{found_unfit[0]}' cannot be saved: if a part holds sharded "
                f"tensors (DTensor), its state must map names to tensors and contain nothing else.\n"
                f"Fix: set is_sharded = True on the class, and keep other values in a second part"
            )
        if different := sorted({name for name, _ in expected.items() ^ digests.items()}):
            raise ConfigError(
                f"the state of the part '{different[0]}' cannot be saved: it differs between rank 0 "
                f"and rank {rank}, but a resume on a different number of ranks would load the state "
                f"of rank 0 everywhere.\nFix: make it equal on all ranks, or set state_of on the "
                f"class: {OWN!r} if each rank needs its own state, {MAIN!r} if only rank 0's counts"
            )


def _state_of(part: Stateful) -> str:
    return getattr(part, "state_of", ALL)


def is_sharded(part: Stateful) -> bool:
    """Return True if the state of a part is sharded over the ranks."""
    return getattr(part, "is_sharded", False)


def _digest(value: Any) -> str:
    """Return a digest that is equal for equal nested containers of tensors and plain values.

    DTensors are left out, because they differ by rank.
    """
    digest = hashlib.blake2b(digest_size=16)
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0]}
    for path, leaf in sorted(leaves.items()):
        if isinstance(leaf, DTensor):
            continue
        digest.update(f"{path} {type(leaf).__name__} ".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            digest.update(bytes_of(leaf.detach()))
        else:
            digest.update(f"{leaf!r} ".encode())
    return digest.hexdigest()


def load_state(checkpoint: CheckpointInfo, state: State, world: World) -> None:
    """Load a verified checkpoint into all parts of `state`.

    Raises `ConfigError` if the checkpoint is from a different model.
    """
    path = checkpoint.path
    manifest = checkpoint.manifest
    is_same_size = manifest.world_size == world.size
    rank = world.rank if is_same_size else 0
    saved = shards.read_torch(path / layout.extra_file(manifest.world_size, rank)) | {
        "model": read_shards(checkpoint, layout.model_file),
        "optimizer": read_shards(checkpoint, layout.optim_file),
        "data": shards.read_torch(path / layout.DATA),
    }
    for name, part in state.items():
        if name not in saved:
            if part.state_dict():
                logger.info("%s has no state of '%s', which starts empty", path, name)
            continue
        if _state_of(part) == OWN and (manifest.mesh != world.mesh_sizes or not is_same_size):
            raise ConfigError(
                f"{path} holds one state of the part '{name}' for each of its ranks "
                f"({manifest.mesh}), but this run has different ranks ({world.mesh_sizes}).\n"
                f"Fix: resume with the same number of ranks, or {layout.new_run_from(path)}"
            )
        if is_sharded(part):
            # The rows of one rank may be in the files of several ranks.
            files = read_shards(checkpoint, layout.extra_file)
            pieces = Shards(path, [extra[name] for extra in files.parts])
            saved[name] = {key: torch.empty_like(value) for key, value in part.state_dict().items()}
            for key, value in saved[name].items():
                shards.copy_slice(pieces.entries(key), value, key, "its dtype")
        part.load_state_dict(saved[name])
