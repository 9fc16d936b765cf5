"""The GPU's one kernel for an RMS norm, and its two backward, on fake CPU tensors: a build of torch for CPUs computes
them in pieces (floor 5).
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model import norm


@torch.library.custom_op("planner::rms_norm", mutates_args=())
def _rms_norm(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only its shape is asked for")


@_rms_norm.register_fake
def _(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("planner::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only its shape is asked for")


@_rms_norm_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = _rms_norm_backward(grad, *ctx.saved_tensors)
    return grads


_rms_norm.register_autograd(_backward, setup_context=_keep)


def fuse_norms(model: nn.Module) -> None:
    """Of every norm that a GPU would compute with torch's own kernels."""
    for module in model.modules():
        if getattr(module.forward, "__func__", None) is norm.forward:
            module.forward = types.MethodType(_forward, module)


def _forward(self: Any, hidden: Tensor) -> Tensor:
    result: Tensor = _rms_norm(hidden, self.weight)[0]
    return result
