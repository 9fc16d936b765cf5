"""The two kernels of an RMS norm on a GPU, forward and backward, for fake tensors.

A CPU build of torch has no such kernel: it would compute the norm in pieces, which take more memory.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model import norm

_OPERATIONS = torch.library.Library("planner", "DEF")
_OPERATIONS.define("rms_norm(Tensor hidden, Tensor weight) -> (Tensor, Tensor)")
_OPERATIONS.define(
    "rms_norm_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor scale) -> (Tensor, Tensor)"
)


@torch.library.impl(_OPERATIONS, "rms_norm", "Meta")
def _(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)


@torch.library.impl(_OPERATIONS, "rms_norm_backward", "Meta")
def _(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        result: Tensor
        result, scale = torch.ops.planner.rms_norm(hidden, weight)
        ctx.save_for_backward(hidden, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grads: tuple[Tensor, Tensor] = torch.ops.planner.rms_norm_backward(grad, *ctx.saved_tensors)
        return grads


def fuse_norms(model: nn.Module) -> None:
    """Replace every norm that a GPU computes with torch's fused kernels."""
    for module in model.modules():
        if getattr(module.forward, "__func__", None) is norm.forward:
            module.forward = types.MethodType(
                lambda self, hidden: FusedNorm.apply(hidden, self.weight), module
            )
