"""Which layers get LoRA adapters, and why others cannot have one.

Layers are chosen here by their full names, because peft gives some names in `target_modules`
another meaning: see `written`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.adapter_names import base_name, is_adapter
from trainer.config import ConfigError, did_you_mean

ALL_LINEAR = "all-linear"
_LINEAR = (nn.Linear, Conv1D)
_ROUTER_NAMES = {"router", "gate", "shared_expert_gate"}
_EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What files, and older versions of transformers, call the layers of one expert."""

_NO_EXPERTS = "the weights of experts are stacked in one tensor, which cannot have an adapter here"
_NO_HEAD = (
    "the embeddings and the output head cannot have adapters here: the head holds the loss, and "
    "may share the embeddings' weight"
)
_NO_MIXER = "the fused kernels of Mamba read its weight directly, past an adapter"


def chosen(model: PreTrainedModel, targets: str | list[str], *, said: str) -> list[str]:
    """The full names of the layers that `targets` names, in the model's order.

    `targets` is `all-linear`, a list of ends of names, or one regular expression of whole names.
    Raises `ConfigError`, which begins with `said`, if they name no layer, or one that cannot have
    an adapter.
    """
    names = [name for name, _ in model.named_modules() if name]
    linear, experts, obstacles = list(_linear(model)), _expert_names(model), _obstacles(model)
    fix = f"\n{_fix(linear, obstacles)}"
    if targets == ALL_LINEAR:
        return [name for name in linear if name not in obstacles and not is_router(name)]
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        matches = _matcher(target, is_pattern=isinstance(targets, str), said=said)
        named = [name for name in names if matches(name)]
        leaves = {_leaf(name) for name in set(named).intersection(linear)}
        # gate_proj may also name a dense MLP or a shared expert, which is then what it means
        if meant := [name for name in experts if matches(name) and _leaf(name) not in leaves]:
            text = f"{said}: '{target}' takes in experts ('{meant[0]}'), which cannot be adapted: {_NO_EXPERTS}."
            raise ConfigError(text + fix)
        for name in named:
            if name in obstacles:
                raise ConfigError(f"{said}: '{name}' cannot be adapted: {obstacles[name]}.{fix}")
        found.update(named)
    if not found:
        raise ConfigError(f"{said} names no layer of this model{_hint(linear, targets)}.{fix}")
    return [name for name in linear if name in found]


def is_router(name: str) -> bool:
    """Whether a module decides which experts compute a token, or by how much they count."""
    return not _ROUTER_NAMES.isdisjoint(name.split("."))


def written(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(target_modules, target_parameters) that make peft adapt exactly the layers of these `names`,
    as short ends.

    For some mixtures of experts peft takes every target module that ends in gate_proj, up_proj or
    down_proj for the experts' stacked weights, even that of a dense MLP or of a shared expert: it
    converts adapters that were trained when each expert had layers of its own. A parameter
    `…gate_proj.weight` is not converted, and has the same adapter.
    """
    ends = _short_ends([name for name, _ in model.named_modules()], set(names))
    converted = _converted_by_peft(model, {_leaf(end) for end in ends})
    parameters = {end for end in ends if _leaf(end) in converted}
    return sorted(ends - parameters), sorted(f"{end}.weight" for end in parameters)


def summary(model: PreTrainedModel, *, rank: int, targets: str | list[str]) -> str:
    """Which kinds of layers have adapters and which do not, and how many parameters train."""
    adapters = [base_name(name) for name, _ in model.named_parameters() if is_adapter(name)]
    adapted = list(dict.fromkeys(name.partition(".lora_")[0] for name in adapters))
    by_count: dict[int, list[str]] = defaultdict(list)
    for kind, count in Counter(_kinds(adapted).values()).items():
        by_count[count].append(kind)
    kinds = [
        f"{', '.join(alike)} ({count}{' each' if len(alike) > 1 else ''})"
        for count, alike in by_count.items()
    ]
    num_all = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    parts = [
        f"LoRA: rank {rank} on {', '.join(kinds)}",
        f"{num_trained:,} of {num_all:,} parameters train ({num_trained / num_all:.1%})",
    ]
    if left_out := list(_left_out(model, set(adapted))):
        parts.append(f"not adapted: {', '.join(left_out)}")
    unused = [
        target
        for target in (targets if isinstance(targets, list) else ())
        if not any(f".{name}".endswith(f".{target}") for name in adapted)
    ]
    if unused:
        parts.append(f"no layer is called {' or '.join(unused)}")
    return "; ".join(parts)


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _LINEAR)}


def _obstacles(model: PreTrainedModel) -> dict[str, str]:
    """{module: why it cannot have an adapter}."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    experts, mixer_layers = set(_experts(model)), set(_read_by_kernels(model))
    found = {}
    for name, module in model.named_modules():
        if any(module is end for end in ends) or isinstance(module, nn.Embedding):
            found[name] = _NO_HEAD
        elif name in experts:
            found[name] = _NO_EXPERTS
        elif name in mixer_layers:
            found[name] = _NO_MIXER
        elif not isinstance(module, _LINEAR):
            found[name] = f"it is no linear layer but a {type(module).__name__}"
        elif not _is_one_product(module):
            found[name] = f"{type(module).__name__} is not one matrix product"
    return found


def _experts(model: nn.Module) -> Iterator[str]:
    """Modules that hold the stacked weights of several experts."""
    for name, module in model.named_modules():
        has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        is_named_so = "expert" in f"{name}.{type(module).__name__}".lower()
        if has_matrix and is_named_so and not isinstance(module, _LINEAR):
            yield name


def _read_by_kernels(model: nn.Module) -> Iterator[str]:
    """Layers of Mamba mixers but their in_proj.

    In training the fused kernels take the weights of these themselves: an adapter around such a
    layer would get no gradient on a GPU. peft refuses out_proj and conv1d of some of these families
    for that reason.
    """
    for name, module in model.named_modules():
        if {"A_log", "D"} <= module._parameters.keys():
            for child, layer in module.named_children():
                if child != "in_proj" and isinstance(layer, (*_LINEAR, nn.Conv1d)):
                    yield f"{name}.{child}"


def _is_one_product(layer: Any) -> bool:
    """Whether a linear layer with a forward pass of its own still turns each row into one row."""
    if isinstance(layer, Conv1D) or type(layer).forward is nn.Linear.forward:
        return True
    try:
        rows = torch.empty(
            2, 3, layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype
        )
        result = layer(rows)
    except Exception:
        return False
    return isinstance(result, torch.Tensor) and result.shape == (2, 3, layer.out_features)


def _matcher(target: str, *, is_pattern: bool, said: str) -> Callable[[str], bool]:
    if not is_pattern:
        return lambda name: name == target or name.endswith(f".{target}")
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise ConfigError(f"{said}: it is no regular expression: {error}") from error
    return lambda name: pattern.fullmatch(name) is not None


def _expert_names(model: nn.Module) -> list[str]:
    """What targets may call experts: their module, its tensors, and the layers that they were
    made of.
    """
    found = []
    for experts in _experts(model):
        tensors = [name for name, _ in model.get_submodule(experts).named_parameters(recurse=False)]
        found += [experts, *(f"{experts}.{leaf}" for leaf in (*tensors, *_EXPERT_LAYERS))]
        found += [f"{experts}.0.{leaf}" for leaf in _EXPERT_LAYERS]
    return found


def _hint(linear: list[str], targets: str | list[str]) -> str:
    leaves = sorted({_leaf(name) for name in linear})
    if isinstance(targets, str) and targets in leaves:
        return f": a string is a regular expression of whole names. model.target_modules=[{targets}] names these layers"
    guesses = [
        did_you_mean(target, leaves)
        for target in ([targets] if isinstance(targets, str) else targets)
    ]
    return "".join(f"; {guess}" for guess in guesses if guess)


def _fix(linear: list[str], obstacles: Mapping[str, str]) -> str:
    leaves = list(dict.fromkeys(_leaf(name) for name in linear if name not in obstacles))
    return f"Fix: model.target_modules=all-linear, or a list of: {', '.join(leaves[:12])}{', …' * (len(leaves) > 12)}"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _short_ends(everything: Iterable[str], names: set[str]) -> set[str]:
    """For each of `names` the shortest end that no other module of the model has."""
    others: set[str] = set()
    for name in everything:
        if name not in names:
            others.update(_ends(name))
    return {next((end for end in _ends(name) if end not in others), name) for name in names}


def _ends(name: str) -> Iterator[str]:
    """`c`, `b.c`, `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    for begin in reversed(range(len(parts))):
        yield ".".join(parts[begin:])


def _converted_by_peft(model: PreTrainedModel, leaves: set[str]) -> set[str]:
    """Which of these target modules peft would turn into experts of this architecture."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    # it asks for layers that are fused in pairs, so all are offered
    probe = LoraConfig(target_modules=sorted(leaves | set(_EXPERT_LAYERS)))
    convert_peft_config_for_transformers(probe, model, None)
    return leaves - set(probe.target_modules or ())


def _kinds(names: Iterable[str]) -> dict[str, str]:
    """{layer: its last name, with the name before where layers in different places share it}."""
    places: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        places[leaf].add(_leaf(parent))
    kinds = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        place = _leaf(parent)
        kinds[name] = leaf if len(places[leaf]) == 1 or place.isdecimal() else f"{place}.{leaf}"
    return kinds


def _left_out(model: PreTrainedModel, adapted: set[str]) -> Iterator[str]:
    """Kinds of layers that a user may miss among the adapted ones."""
    if any(_experts(model)):
        yield "experts"
        holders = [
            base_name(f"{name}.").rstrip(".")
            for name, module in model.named_modules()
            if module._parameters
        ]
        if any(is_router(name) and name not in adapted for name in holders):
            yield "routers"
    linear = _linear(model)
    if layers := dict.fromkeys(_leaf(name) for name in _read_by_kernels(model) if name in linear):
        yield f"{', '.join(layers)} of Mamba mixers"
