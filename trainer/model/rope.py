"""Rotary positions whose frequencies follow the length of the text: longrope and dynamic NTK.

transformers chooses the frequencies by the longest position of the whole forward pass, which makes
documents side by side feel each other, waits for the device to learn it, and dynamic NTK remembers
it until the next. Here each document gets those that a new model would give it.
"""

import inspect
import types
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def length_limit(config: PretrainedConfig) -> int | None:
    """The longest text up to which the frequencies stay as they are; None if they do not depend
    on it.
    """
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    # one, or by layer type
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return min(
        (_limit(config, kind) for kind in kinds if _follows_length(_name(kind))), default=None
    )


def follow_documents(model: PreTrainedModel, *, is_packed: bool) -> None:
    """Choose the frequencies by the document's length alone, known on the host; packed ones are
    within the limit.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_follows_length, kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = types.MethodType(partial(_forward, is_packed=is_packed), module)


def _forward(
    self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None, *, is_packed: bool
) -> tuple[Tensor, Tensor]:
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    name = self.rope_type if layer_type is None else self.rope_type[layer_type]
    frequencies = getattr(self, f"{prefix}original_inv_freq").to(x.device)
    if _follows_length(name):
        parameters = (
            self.config.rope_parameters
            if layer_type is None
            else self.config.rope_parameters[layer_type]
        )
        length = 0 if is_packed else position_ids.shape[-1]
        if length > _limit(self.config, parameters):
            # a tensor for dynamic NTK, as transformers has it: an int would be rounded otherwise
            seq_len = length if name == "longrope" else torch.tensor(length)
            frequencies, _ = ROPE_INIT_FUNCTIONS[name](
                self.config, x.device, seq_len=seq_len, **of_layer
            )
    setattr(self, f"{prefix}inv_freq", frequencies)
    plain = inspect.unwrap(type(self).forward)  # without the choice by the longest position
    with torch.no_grad():
        cos_sin: tuple[Tensor, Tensor] = plain(self, x, position_ids, **of_layer)
    return cos_sin


def _name(kind: dict[str, Any]) -> Any:
    return kind.get("rope_type", kind.get("type"))


def _follows_length(name: Any) -> bool:
    return isinstance(name, str) and (name == "longrope" or "dynamic" in name)


def _limit(config: PretrainedConfig, kind: dict[str, Any]) -> int:
    original = kind.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(
        original if _name(kind) == "longrope" and original else config.max_position_embeddings
    )
