"""Weights into a sharded model on meta: every rank reads only its own slices, or makes them from a keyed seed."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import ConfigError
from trainer.model.packed_lm import ModelSource
from trainer.runtime import seeding

logger = logging.getLogger(__name__)


def materialize(model: PreTrainedModel, device: torch.device, *, buffer_device: torch.device) -> None:
    """Give every parameter memory on `device` (undefined values), keep buffers' values and tied parameters tied."""
    buffers = dict(model.named_buffers())
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(buffer_device)
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def load_weights(model: PreTrainedModel, source: ModelSource, *, seed: int) -> None:
    """Fill the model: from safetensors slices when names and shapes are the model's own, through transformers'
    loader when it must convert them, or with the architecture's own initialisation keyed by the seed.
    """
    if source.random_weights:
        _initialize(model, source, seed)
        return
    files = _index(Path(source.path))
    if _matches(model, files):
        _load_slices(model, files)
    else:
        _load_converted(model, source)


def has_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors")) or any(Path(path).glob("pytorch_model*.bin"))


def local_slices(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """(this rank's memory of a parameter, where that lies in the whole tensor)."""
    if not isinstance(parameter, DTensor):
        return parameter.data, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local().detach()
    return local, tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _index(path: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file."""
    listing = path / "model.safetensors.index.json"
    if listing.exists():
        return {name: path / file for name, file in json.loads(listing.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            files.update(dict.fromkeys(reader.keys(), file))
    return files


def _matches(model: PreTrainedModel, files: dict[str, Path]) -> bool:
    """Whether the files hold exactly this model's parameters (a tied head may be absent or repeated)."""
    parameters = dict(model.named_parameters())
    if not set(parameters) <= set(files):
        return False
    extra = set(files) - set(parameters) - {"lm_head.weight"}
    return not {name for name in extra if not name.endswith("rotary_emb.inv_freq")}


def _load_slices(model: PreTrainedModel, files: dict[str, Path]) -> None:
    readers: dict[Path, Any] = {}
    for name, parameter in model.named_parameters():
        reader = readers.setdefault(files[name], safe_open(files[name], framework="pt"))
        stored = reader.get_slice(name)
        if tuple(stored.get_shape()) != tuple(parameter.shape):
            raise ConfigError(
                f"{files[name]}: tensor {name} has shape {tuple(stored.get_shape())}, the config asks for "
                f"{tuple(parameter.shape)}"
            )
        local, where = local_slices(parameter)
        if local.numel():
            local.copy_(stored[where] if where else reader.get_tensor(name))


def _load_converted(model: PreTrainedModel, source: ModelSource) -> None:
    """Let transformers convert names and layouts (fused experts, legacy names): the whole model in each rank."""
    logger.info("weights need conversion: each rank reads the whole model once")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.path, dtype="auto", trust_remote_code=source.trust_remote_code, output_loading_info=True
    )
    whole, report = loaded
    if report["missing_keys"]:
        raise ConfigError(
            f"model.partial_pretrain={source.path} lacks weights for {sorted(report['missing_keys'])[:5]}; "
            f"use model.random_weights=true to start from random ones"
        )
    _copy_slices(model, whole.state_dict())


def _initialize(model: PreTrainedModel, source: ModelSource, seed: int) -> None:
    """transformers' own initialisation of the whole model on the CPU, then sliced: equal for every world size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.key("init", seed))
        whole = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code, attn_implementation="eager"
        )
    _copy_slices(model, whole.state_dict())


def _copy_slices(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        local, where = local_slices(parameter)
        local.copy_(tensors[name][where])
