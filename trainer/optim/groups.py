"""Parameter groups: trained parameters that share weight decay and learning rate."""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from trainer.config import OptimConfig, OptimGroup, names_matching


def trainable(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {trained parameter: its name}."""
    return {p: name for name, p in model.named_parameters() if p.requires_grad}


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Return True for matrices. Norms over heads and biases of fused experts also have two
    dimensions, but are not matrices.
    """
    owner, _, leaf = name.rpartition(".")
    return (
        parameter.ndim >= 2 and not leaf.endswith("bias") and "norm" not in owner.rpartition(".")[2]
    )


def parameter_groups(
    model: nn.Module, parameters: Iterable[nn.Parameter], config: OptimConfig
) -> list[dict[str, Any]]:
    """Group the parameters by learning rate and weight decay.

    The first entry of `optim.groups` that matches a parameter decides. Without a match, matrices
    decay by `optim.weight_decay` and other parameters do not decay. An entry may match either name
    of a tied weight. The first group may be empty.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    entries = [*config.groups, OptimGroup("")]  # the last one matches the rest
    members: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, config.weight_decay): []}
    for parameter in parameters:
        own = names[parameter]
        entry = next(e for e in entries if any(re.search(e.match, name) for name in own))
        weight_decay = entry.weight_decay
        if weight_decay is None:
            weight_decay = config.weight_decay if is_decayed(own[0], parameter) else 0.0
        members.setdefault((entry.lr_scale, weight_decay), []).append(parameter)
    return [
        {"params": own, "lr": 0.0, "lr_scale": lr_scale, "weight_decay": weight_decay}
        for (lr_scale, weight_decay), own in members.items()
    ]


def require_matches(model: nn.Module, config: OptimConfig) -> None:
    """Raise `ConfigError` for an entry of `optim.groups` that matches no trained parameter."""
    named = model.named_parameters(remove_duplicate=False)
    trained = [name for name, parameter in named if parameter.requires_grad]
    for number, entry in enumerate(config.groups):
        key = f"'optim.groups[{number}].match'"
        names_matching(entry.match, trained, key=key, kind="trained parameter")
