"""Kernels that a build of torch for CPUs has no form of: each asks what the real one does, and counts as it would."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

NUM_KERNELS = {"fakecuda::rms_norm": 1, "fakecuda::rms_norm_backward": 2}


@torch.library.custom_op("fakecuda::rms_norm", mutates_args=())
def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise AssertionError("only its shape is asked for")


@_rms_norm.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert hidden.device.type == weight.device.type == "cuda"
    assert hidden.dtype == weight.dtype, "torch would compute it in pieces"
    assert weight.shape == hidden.shape[-1:]
    return torch.empty_like(hidden)


@torch.library.custom_op("fakecuda::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only its shape is asked for")


@_rms_norm_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert grad.shape == hidden.shape and grad.dtype == hidden.dtype
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_rms_norm_backward(grad, *ctx.saved_tensors), None


_rms_norm.register_autograd(_backward, setup_context=_keep)


def fused_rms_norm() -> Any:
    """`torch.nn.functional.rms_norm` as it is on a card: `aten::_fused_rms_norm`, one kernel and two behind it."""
    return patch("torch.nn.functional.rms_norm", lambda hidden, shape, weight, eps: _rms_norm(hidden, weight, eps))
