"""Kernels that a build of torch for CPUs has no form of: each asks what the real one does, and
counts as it would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

NUM_KERNELS = {"fakecuda::norm": 1, "fakecuda::norm_backward": 2}


def _rms_norm(hidden: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    assert hidden.device.type == weight.device.type == "cuda"
    assert hidden.dtype == weight.dtype, "torch would compute it in pieces"
    assert weight.shape == hidden.shape[-1:]
    return _norm(hidden, weight)


@torch.library.custom_op("fakecuda::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor) -> Tensor:
    raise AssertionError("only its shape is asked for")


@torch.library.custom_op("fakecuda::norm_backward", mutates_args=())
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only its shape is asked for")


_norm.register_fake(lambda x, weight: torch.empty_like(x))
_norm_backward.register_fake(
    lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight))
)
_norm.register_autograd(
    lambda ctx, grad: _norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


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
    """What torch computes in pieces where it has no kernel: `aten::_fused_rms_norm`, one and two
    behind it, and `aten::silu_backward`.
    """
    functional = "torch.nn.functional"
    with (
        patch(f"{functional}.rms_norm", _rms_norm),
        patch(f"{functional}.silu", lambda x, inplace=False: _silu(x)),
    ):
        yield
