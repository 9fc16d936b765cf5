"""Kernels that the CPU build of torch lacks. Each requires the inputs of the real kernel, and
counts as that kernel.
"""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

NUM_KERNELS = {"fakecuda::norm": 1, "fakecuda::norm_backward": 2}


def _rms_norm(hidden, shape, weight, eps):
    assert hidden.device.type == weight.device.type == "cuda"
    assert hidden.dtype == weight.dtype, "torch would compute it in pieces"
    assert weight.shape == hidden.shape[-1:]
    return OPERATIONS.norm(hidden, weight)


def _gradients(backward, ctx, grad):
    return backward(grad, *ctx.saved_tensors)


OPERATIONS = torch.ops.fakecuda
"""Only their shapes matter: they have no code for any device."""
for name, inputs, gradients in (
    ("norm", "Tensor x, Tensor weight", "(Tensor, Tensor)"),
    ("silu", "Tensor x", "Tensor"),
):
    torch.library.define(f"fakecuda::{name}", f"({inputs}) -> Tensor")
    torch.library.define(f"fakecuda::{name}_backward", f"(Tensor grad, {inputs}) -> {gradients}")
    torch.library.register_fake(f"fakecuda::{name}", lambda x, *_: torch.empty_like(x))
    torch.library.register_autograd(
        f"fakecuda::{name}",
        partial(_gradients, getattr(OPERATIONS, f"{name}_backward")),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
torch.library.register_fake("fakecuda::silu_backward", lambda grad, x: torch.empty_like(x))
torch.library.register_fake(
    "fakecuda::norm_backward",
    lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
)


@contextmanager
def of_a_card():
    """Replace functions that torch computes in pieces on a CPU by the GPU's operations.

    These are `aten::_fused_rms_norm` (one kernel forward and two backward) and
    `aten::silu_backward`.
    """
    functional = "torch.nn.functional"
    with (
        patch(f"{functional}.rms_norm", _rms_norm),
        patch(f"{functional}.silu", lambda x, inplace=False: OPERATIONS.silu(x)),
    ):
        yield
