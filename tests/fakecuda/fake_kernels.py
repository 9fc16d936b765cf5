"""Kernels that a build of torch for CPUs has no form of: each asks what the real one does, and counts as it would."""

from collections.abc import Iterator
from contextlib import contextmanager
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


@torch.library.custom_op("fakecuda::silu", mutates_args=())
def _silu(x: Tensor) -> Tensor:
    raise AssertionError("only its shape is asked for")


@torch.library.custom_op("fakecuda::silu_backward", mutates_args=())
def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    raise AssertionError("only its shape is asked for")


_silu.register_fake(torch.empty_like)
_silu_backward.register_fake(lambda grad, x: torch.empty_like(x))
_silu.register_autograd(
    lambda ctx, grad: _silu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def of_a_card() -> Iterator[None]:
    """What torch computes in pieces where it has no kernel: `aten::_fused_rms_norm`, one and two behind it, and
    `aten::silu_backward`.
    """
    functional = "torch.nn.functional"
    with (
        patch(f"{functional}.rms_norm", lambda hidden, shape, weight, eps: _rms_norm(hidden, weight, eps)),
        patch(f"{functional}.silu", lambda x, inplace=False: _silu(x)),
    ):
        yield
