"""Chooses the layers that get LoRA adapters, and explains why others cannot have one.

Layers are chosen by their full names, because peft gives some names in `target_modules` a different
meaning: see `written`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.config import ConfigError, did_you_mean
from trainer.model.adapter_names import is_adapter
from trainer.model.weights import has_tied_head

ALL_LINEAR = "all-linear"
_LINEAR = (nn.Linear, Conv1D)
_ROUTER_NAMES = {"router", "gate", "shared_expert_gate"}
"""Modules that choose the experts of a token or compute their weights."""
_EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of an expert's layers that peft may convert to stacked weights."""
_NO_HEAD = (
    "embeddings and the output head cannot have adapters, because the head computes the loss and "
    "may share the weight of the embeddings"
)
_NO_MIXER = "the fused Mamba kernels read its weight directly and bypass an adapter"


def chosen(model: PreTrainedModel, targets: str | list[str], *, said: str) -> list[str]:
    """Return the full names of the layers that `targets` names, in the model's order.

    `targets` is `all-linear`, a list of name endings, or one regular expression that matches whole
    names. Stacked expert weights are named together with their module, for example
    `experts.down_proj`: a plain `down_proj` means dense layers and shared experts.

    Raises `ConfigError`, whose message begins with `said`, if a target matches no layer, or matches
    a layer that cannot have an adapter.
    """
    stacked = expert_weights(model)
    obstacles = _obstacles(model) | dict.fromkeys(stacked, "")
    linear = [name for name, obstacle in obstacles.items() if not obstacle and name not in stacked]
    if targets == ALL_LINEAR:
        return [name for name in linear if _ROUTER_NAMES.isdisjoint(name.split("."))]
    ends = dict.fromkeys([*map(leaf, linear), *(".".join(n.split(".")[-2:]) for n in stacked)])
    fix = f"Fix: model.target_modules=all-linear, or a list of: {', '.join(ends)}"
    is_pattern = isinstance(targets, str)
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        try:
            pattern = re.compile(target if is_pattern else rf"(.*\.)?{re.escape(target)}")
        except re.error as error:
            raise ConfigError(f"{said}: it is not a regular expression: {error}") from error
        named = [
            name
            for name in obstacles
            if pattern.fullmatch(name) and (name not in stacked or name.split(".")[-2] in target)
        ]
        if not named:
            hint = did_you_mean(target, list(ends))
            if target in ends:
                hint = (
                    f"a string is a regular expression that must match whole names; for layers "
                    f"whose names end in {target}, write model.target_modules=[{target}]"
                )
            raise ConfigError(
                f"{said}: '{target}' matches no layer of this model{hint and f'; {hint}'}.\n{fix}"
            )
        for name in named:
            if obstacles[name]:
                raise ConfigError(f"{said}: '{name}' cannot be adapted: {obstacles[name]}.\n{fix}")
        found.update(named)
    return [name for name in obstacles if name in found]


def ends_named(model: PreTrainedModel, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return {full name: module} of the input embeddings and the output head, if `names` contains
    the last part of their names. Returns both if they share one weight.

    Raises `ConfigError` for any other name.
    """
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = {leaf(name): name for name, module in model.named_modules() if module in both}
    named = [leaf(name) for name in names]
    for name in named:
        if name not in ends:
            raise ConfigError(
                f"model.modules_to_save: '{name}' is neither the input embeddings nor the output head "
                f"of this model.\nFix: choose from {', '.join(ends)}"
            )
    if named and has_tied_head(model):
        named = list(ends)
    return {full: model.get_submodule(full) for end, full in ends.items() if end in named}


def expert_weights(model: PreTrainedModel) -> list[str]:
    """Return the stacked expert weights that can have adapters, in peft's order."""
    return [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if {"num_experts", "is_transposed", "has_gate"} <= vars(module).keys()
        for weight, stacked in module.named_parameters(recurse=False)
        if stacked.ndim == 3
    ]


def written(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the (target_modules, target_parameters) that make peft adapt exactly the layers
    `names`.

    For some mixtures of experts, peft takes every target module that ends in gate_proj, up_proj or
    down_proj for stacked expert weights, even in a dense MLP or a shared expert. It does this to
    convert adapters that were trained when each expert had its own layers. It does not convert a
    parameter `…gate_proj.weight`, which gets the same adapter.
    """
    adapted = set(names)
    left_out = {leaf(name) for name, _ in model.named_modules() if name not in adapted}
    # the last part of a name stands for all layers that end in it
    ends = {name if leaf(name) in left_out else leaf(name) for name in adapted}
    converted = _converted_by_peft(model, {leaf(end) for end in ends})
    parameters = {end for end in ends if leaf(end) in converted}
    return sorted(ends - parameters), sorted(f"{end}.weight" for end in parameters)


def summary(model: PreTrainedModel, *, rank: int) -> str:
    """Return a line that lists the layers with and without adapters, by the last part of their
    names.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = Counter[str]()
    left_out = Counter[str]()
    inner = set()
    for name, module in model.named_modules():
        if weight := getattr(module, "parameter_name", ""):
            adapted[f"experts.{weight}"] += 1
            inner.add(f"{name}.base_layer")
        elif name in inner:
            continue
        elif name.endswith(".base_layer"):
            adapted[leaf(name.removesuffix(".base_layer"))] += 1
        elif _has_matrix(module) and module not in ends and not is_adapter(f"{name}."):
            left_out[leaf(name)] += 1
    said = f"LoRA of rank {rank} on {_counted(adapted)}"
    return f"{said}; not adapted: {_counted(left_out)}" if left_out else said


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in names.items())


def _obstacles(model: PreTrainedModel) -> dict[str, str]:
    """Return {module: why it cannot have an adapter, or ""}, in the model's order."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        found |= dict.fromkeys(_read_by_kernels(name, module), _NO_MIXER)
        if name in found:
            continue
        if module in ends or isinstance(module, nn.Embedding):
            found[name] = _NO_HEAD
        elif not isinstance(module, _LINEAR):
            found[name] = f"it is not a linear layer but a {type(module).__name__}"
        elif not _is_one_product(module):
            found[name] = f"{type(module).__name__} is not one matrix product"
        else:
            found[name] = ""
    return found


def _read_by_kernels(name: str, module: nn.Module) -> list[str]:
    """Return the names of a Mamba mixer's layers, except its in_proj.

    In training, the fused kernels read the weights of these layers directly, so an adapter around
    such a layer would get no gradient on a GPU. peft refuses out_proj and conv1d of some of these
    families for that reason.
    """
    if not {"A_log", "D"} <= module._parameters.keys():
        return []
    kinds = (*_LINEAR, nn.Conv1d)
    layers = [child for child, layer in module.named_children() if isinstance(layer, kinds)]
    return [f"{name}.{child}" for child in layers if child != "in_proj"]


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _is_one_product(layer: Any) -> bool:
    """Return True if a linear layer maps each row to one row, even if it has its own forward."""
    if isinstance(layer, Conv1D) or type(layer).forward is nn.Linear.forward:
        return True
    try:
        result = layer(layer.weight.new_empty(2, 3, layer.in_features))
    except Exception:
        return False
    return isinstance(result, torch.Tensor) and result.shape == (2, 3, layer.out_features)


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _converted_by_peft(model: PreTrainedModel, leaves: set[str]) -> set[str]:
    """Return the target modules that peft would take for expert layers in this architecture."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    # peft requires both layers of a fused pair, so all are offered
    probe = LoraConfig(target_modules=sorted(leaves | set(_EXPERT_LAYERS)))
    convert_peft_config_for_transformers(probe, model, None)
    return leaves - set(probe.target_modules or ())
