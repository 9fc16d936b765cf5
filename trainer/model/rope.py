"""Rotary positions whose frequencies depend on the document length: longrope and dynamic NTK.

transformers chooses the frequencies by the longest position of the whole forward pass, which
requires waiting for the device. With dynamic NTK it also remembers the longest text so far. Here
each document gets the frequencies that a fresh model would use for it.
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
    """Return the longest document for which the frequencies are constant; None if they do not
    depend on the length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # one set of parameters, or one for each layer type
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    limits = (_limit(config, kind) for kind in kinds)
    return min((limit for limit in limits if limit is not None), default=None)


def follow_documents(model: PreTrainedModel, *, is_packed: bool) -> None:
    """Choose the frequencies by the document length, which is known on the host. Packed documents
    never exceed the length limit.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_follows_length, kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = types.MethodType(partial(_forward, is_packed=is_packed), module)


def _forward(
    self: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
    *,
    is_packed: bool,
) -> tuple[Tensor, Tensor]:
    parameters = self.config.rope_parameters
    prefix = ""
    of_layer = {}
    if layer_type is not None:
        parameters = parameters[layer_type]
        prefix = f"{layer_type}_"
        of_layer = {"layer_type": layer_type}
    frequencies = getattr(self, f"{prefix}original_inv_freq").to(x.device)
    limit = _limit(self.config, parameters)
    length = position_ids.shape[-1]
    if limit is not None and not is_packed and length > limit:
        # a tensor as in transformers: an int would be rounded differently
        frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            self.config, x.device, seq_len=torch.tensor(length), **of_layer
        )
    setattr(self, f"{prefix}inv_freq", frequencies)
    plain = inspect.unwrap(type(self).forward)  # without the choice by the longest position
    with torch.no_grad():
        cos_sin: tuple[Tensor, Tensor] = plain(self, x, position_ids, **of_layer)
    return cos_sin


def _limit(config: PretrainedConfig, kind: dict[str, Any]) -> int | None:
    name = kind.get("rope_type")
    if not _follows_length(name):
        return None
    limit: int = config.max_position_embeddings
    return kind.get("original_max_position_embeddings", limit) if name == "longrope" else limit


def _follows_length(name: Any) -> bool:
    return isinstance(name, str) and (name == "longrope" or "dynamic" in name)
