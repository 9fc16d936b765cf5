"""Weights into a sharded model on meta: every rank reads only its own slices, or makes them from a keyed seed."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import ConfigError
from trainer.model.packed_lm import ModelSource
from trainer.model.source import INDEX, read_index
from trainer.runtime import seeding

logger = logging.getLogger(__name__)
_SINGLE_FILE = "model.safetensors"
_STORED_DTYPES = {"F64", "F32", "F16", "BF16"}


def materialize(model: PreTrainedModel, device: torch.device, *, buffer_device: torch.device) -> None:
    """Give every parameter memory on `device` (undefined values), keep buffers' values and tied parameters tied."""
    buffers = dict(model.named_buffers())
    is_tied = _is_tied(model)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(buffer_device)
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def load_weights(model: PreTrainedModel, source: ModelSource, *, seed: int) -> None:
    """Fill the model: from safetensors slices when their names are the model's own, through transformers' loader when
    it must convert them, or with the architecture's own initialisation keyed by the seed. Collective.
    """
    if source.random_weights:
        _from_main_rank(model, lambda: _initialized(model, source, seed))
        return
    files = _index(Path(source.path))
    if not _matches(model, files):
        logger.info("weights need conversion: rank 0 reads and converts the whole model")
        _from_main_rank(model, lambda: _converted(source))
        return
    try:
        _load_slices(model, files)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.partial_pretrain={source.path}: weights cannot be read: {error}") from error


def local_slices(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """(this rank's memory of a parameter, where that lies in the whole tensor)."""
    if not isinstance(parameter, DTensor):
        return parameter.data, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local().detach()
    return local, tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters once each (a tied head is absent), then the buffers that belong to the weights."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    return parameters | buffers


def _index(path: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, looked up in transformers' order: one file, else the index of several."""
    if (path / _SINGLE_FILE).exists():
        try:
            with safe_open(path / _SINGLE_FILE, framework="pt") as reader:
                return dict.fromkeys(reader.keys(), path / _SINGLE_FILE)
        except SafetensorError as error:
            raise ConfigError(f"{path / _SINGLE_FILE} cannot be read: {error}") from error
    if (path / INDEX).exists():
        return {name: path / file for name, file in read_index(path).items()}
    return {}


def _matches(model: PreTrainedModel, files: dict[str, Path]) -> bool:
    """Whether the files hold exactly this model's tensors (a tied head may be absent or repeated)."""
    needed = set(_stored_tensors(model))
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    extra = {name for name in set(files) - needed - aliases if not name.endswith("rotary_emb.inv_freq")}
    return needed <= set(files) and not extra


def _load_slices(model: PreTrainedModel, files: dict[str, Path]) -> None:
    readers: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in set(files.values())}
    for name, tensor in _stored_tensors(model).items():
        stored = readers[files[name]].get_slice(name)
        if tuple(stored.get_shape()) != tuple(tensor.shape):
            raise ConfigError(
                f"{files[name]}: tensor {name} has shape {tuple(stored.get_shape())}, the config asks for "
                f"{tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and stored.get_dtype() not in _STORED_DTYPES:
            raise ConfigError(f"{files[name]}: tensor {name} is {stored.get_dtype()}, no floating-point weights")
        local, where = local_slices(tensor)
        if local.numel():
            local.copy_(stored[where] if where else readers[files[name]].get_tensor(name))
    _require_same_tied(model, files, readers)


def _require_same_tied(model: PreTrainedModel, files: dict[str, Path], readers: dict[Path, Any]) -> None:
    """A head of its own under a config that ties it would be dropped without a word."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = names[id(parameter)]
        if name == kept or name not in files:
            continue
        if not torch.equal(readers[files[name]].get_tensor(name), readers[files[kept]].get_tensor(kept)):
            raise ConfigError(
                f"{files[name]}: {name} differs from {kept}, but config.json ties them; "
                f"set tie_word_embeddings to false there"
            )


def _converted(source: ModelSource) -> dict[str, Tensor]:
    """transformers' own loader: it converts names and layouts (fused experts, legacy names)."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.partial_pretrain={source.path}: weights cannot be loaded: {error}") from error
    whole, report = loaded
    if report["missing_keys"]:
        raise ConfigError(
            f"model.partial_pretrain={source.path} lacks weights for {sorted(report['missing_keys'])[:5]}; "
            f"use model.random_weights=true to start from random ones"
        )
    if report["unexpected_keys"]:
        logger.warning("weights that the architecture does not have are left out: %s", report["unexpected_keys"])
    if getattr(whole.config, "tie_word_embeddings", False) and not _is_tied(whole):
        raise ConfigError(
            f"model.partial_pretrain={source.path}: the output head differs from the embeddings, but config.json ties "
            f"them; set tie_word_embeddings to false there"
        )
    tensors: dict[str, Tensor] = whole.state_dict()
    return tensors


def _initialized(model: PreTrainedModel, source: ModelSource, seed: int) -> dict[str, Tensor]:
    """transformers' own initialisation on the CPU: equal for every world size."""
    config = copy.deepcopy(model.config)  # the attention chosen below is written into it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.key("init", seed))
        whole = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=source.trust_remote_code, attn_implementation="eager"
        )
    tensors: dict[str, Tensor] = whole.state_dict()
    return tensors


def _from_main_rank(model: PreTrainedModel, make: Callable[[], dict[str, Tensor]]) -> None:
    """Rank 0 makes all tensors whole, the others receive one at a time and keep their slices: one copy per run."""
    is_main = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    outcome: list[ConfigError | None] = [None]
    if is_main:
        try:
            tensors = make()
        except ConfigError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
    for name, tensor in _stored_tensors(model).items():
        local, where = local_slices(tensor)
        if is_main:
            whole = tensors[name].to(local.device, tensor.dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        dist.broadcast(whole, src=0)
        local.copy_(whole[where])
