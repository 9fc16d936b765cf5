"""Fills a sharded model with weights.

Every rank reads only its own slices from the files. Random weights are made on rank 0 from a seed
and broadcast.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import ConfigError
from trainer.model import new_tokens, nf4
from trainer.model.pretrained import ModelSource, stored_tensors
from trainer.model.weights import StoredTensor, TensorGroup, has_tied_head, local_slices
from trainer.runtime import seeding
from trainer.runtime.log import ProgressLines

_STORED_DTYPES = {"F64", "F32", "F16", "BF16"}


def materialize(
    model: PreTrainedModel, device: torch.device, *, buffer_device: torch.device
) -> None:
    """Allocate memory for every parameter on `device`, with undefined values. Buffers keep their
    values, and tied parameters stay tied.
    """
    buffers = dict(model.named_buffers())
    is_tied = has_tied_head(model)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(buffer_device)
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def load_weights(model: PreTrainedModel, source: ModelSource, *, seed: int) -> None:
    """Fill the model. Collective.

    If the files store a tensor as the model does, every rank reads its own slices of it. Tensors
    that transformers converts are read whole, one group at a time. With `random_weights`, the
    architecture's own initialisation is used, keyed by the seed.
    """
    if source.random_weights:
        _from_main_rank(model, _initialized(model, source, seed) if dist.get_rank() == 0 else {})
        return
    found = source.weights
    vars(source).pop("weights")  # the files are closed when this function returns
    found.require_all_of(model)
    tensors = stored_tensors(model)
    embeddings = model.get_input_embeddings().weight
    grown = {embeddings, *model.get_output_embeddings().parameters()}
    num_stored = 0
    shown = ProgressLines("load", source.path) if dist.get_rank() == 0 else None
    try:
        for number, group in enumerate(found.groups):
            if shown is not None:
                done = number / len(found.groups)
                shown.tell(f"{done:.0%} of the tensors")
            first = tensors[group.own[0]]
            may_grow = bool(source.new_tokens) and first in grown
            fill(group, tensors, found.files, may_grow=may_grow)
            if first is embeddings:
                num_stored = found.files[group.stored[0]].shape[0]
    except ConfigError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model.partial_pretrain={source.path}: weights cannot be loaded: {error}"
        ) from error
    if source.new_tokens:
        new_tokens.fill_rows(model, source.new_tokens, num_stored, seed=seed)


def fill(
    group: TensorGroup,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, StoredTensor],
    *,
    may_grow: bool = False,
) -> None:
    """Copy this rank's slices from the files' tensors into the model's. With `may_grow`, the files
    may have fewer rows than the model.
    """
    stored = [files[name] for name in group.stored]
    own = [tensors[name] for name in group.own]
    if all(tensor.is_floating_point() or nf4.is_nf4(tensor) for tensor in own):
        for name, found in zip(group.stored, stored, strict=True):
            if found.dtype not in _STORED_DTYPES:
                raise ConfigError(
                    f"{found.file}: tensor {name} is {found.dtype}, but weights must be floating-point"
                )
    slices = [_weight_slices(tensor) for tensor in own]
    if group.converter is None:
        local, where = slices[0]
        shape = stored[0].shape
        if may_grow and shape[0] < own[0].shape[0]:
            first = min(where[0].start, shape[0])
            last = min(where[0].stop, shape[0])
            local = local[: last - first]
            where = (slice(first, last), *where[1:])
            shape = (own[0].shape[0], *shape[1:])
        _require_shape(shape, own[0], f"{stored[0].file}: tensor {group.stored[0]}")
        if local.numel():
            _put(local, stored[0].read(where))
    elif any(local.numel() for local, _ in slices):
        made = group.to_own([found.whole() for found in stored])
        for name, tensor, (local, where) in zip(group.own, own, slices, strict=True):
            what = f"{stored[0].file}: {name}, made from {group.stored[0]}, …"
            _require_shape(made[name].shape, tensor, what)
            _put(local, made[name][where])


def _weight_slices(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return (this rank's shard of a parameter, the slices of the whole weight that it holds)."""
    local, where = local_slices(tensor)
    if nf4.is_nf4(tensor):
        where = (where[0], slice(0, nf4.weight_shape(tensor)[1]))
    return local, where


def _put(local: Tensor, values: Tensor) -> None:
    local.copy_(nf4.quantized(values) if nf4.is_nf4(local) else values)


def _require_shape(found: Sequence[int], tensor: Tensor, what: str) -> None:
    shape = nf4.weight_shape(tensor)
    if tuple(found) != shape:
        raise ConfigError(f"{what} has shape {tuple(found)}, but the config requires {shape}")


def _initialized(model: PreTrainedModel, source: ModelSource, seed: int) -> dict[str, Tensor]:
    """Return transformers' own initialisation, made on the CPU so that it is equal for every number
    of ranks.
    """
    config = copy.deepcopy(model.config)  # the attention chosen below is written into it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.key("init", seed))
        whole = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            attn_implementation="eager",
        )
    return whole.state_dict()


def _from_main_rank(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Broadcast the tensors of rank 0 one at a time; each rank keeps its slices. Only rank 0 holds
    a whole copy.
    """
    for name, tensor in stored_tensors(model).items():
        local, where = local_slices(tensor)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        if tensors:
            whole.copy_(tensors[name])
        dist.broadcast(whole, src=0)
        local.copy_(whole[where])
