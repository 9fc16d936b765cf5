"""Optimizers by name (`optim.name`). This imports no torch, so a mistyped name fails at once."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from trainer.config import OptimConfig
    from trainer.optim.clip import Optimizer


def adamw(model: "nn.Module", config: "OptimConfig") -> "Optimizer":
    from trainer.optim.adamw import AdamW

    return AdamW(model, config)


def muon(model: "nn.Module", config: "OptimConfig") -> "Optimizer":
    from trainer.optim.muon import Muon

    return Muon(model, config)


OPTIMIZERS: dict[str, Callable[["nn.Module", "OptimConfig"], "Optimizer"]] = {
    "adamw": adamw,
    "muon": muon,
}
"""To add an optimizer, add an entry here. It must create all its state in its constructor;
checkpoints save the state by parameter name.
"""
