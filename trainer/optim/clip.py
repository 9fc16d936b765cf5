"""Global gradient norm over sharded parameters, and the update that is clipped by it.

torch's fp32 norm differs by 5e-5 between world sizes; squares summed in float64 agree to 2e-7.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Optimizer(torch.optim.Optimizer):
    """What training asks of an optimizer beyond torch's own interface.

    `step` reads two scalars on the device, as torch's fused optimizers do: gradients are divided by `grad_scale`, and
    where `found_inf` is not 0 nothing changes, the momentum and the step counts included. `rounding_key`, another at
    each step, chooses how results in bfloat16 are rounded.
    """

    grad_scale: Tensor
    found_inf: Tensor
    rounding_key: int

    def update_of(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """What the last step took from this rank's shard of `parameter`, a new tensor. May be collective."""
        raise NotImplementedError


def local_square_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Sum of squared gradient elements of this rank's shards: float64 scalar on the gradients' device."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def clipped_step(
    optimizer: Optimizer, *, total_norm: Tensor, is_skipped: Tensor, max_norm: float, rounding_key: int
) -> None:
    """Update with gradients scaled by min(1, max_norm / total_norm), or not at all where `is_skipped` holds.

    `total_norm` (global) and `is_skipped` are scalars equal on all ranks. Both act on the device, where the gradients
    are read anyway: the host does not wait for the backward pass before it launches the update.
    A step left out changes nothing, the optimizer's step counts included. Gradients are left scaled.
    torch's own clipping adds 1e-6 to the norm, which shifts every clipped update; this does not.
    """
    device = next(p.device for group in optimizer.param_groups for p in group["params"])  # the host with CPU offload
    optimizer.grad_scale = (total_norm / max_norm).clamp(min=1.0).to(device, torch.float32)
    optimizer.found_inf = is_skipped.to(device, torch.float32)
    optimizer.rounding_key = rounding_key
    optimizer.step()


@torch.no_grad()
def norm_squares(optimizer: Optimizer) -> Tensor:
    """Squared norms of this rank's shards of the parameters and of the last update of them, float64 [2]; of an update
    that was left out 0.

    One pass over the shards, one temporary of a parameter's size.
    """
    sums = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for index, tensor in enumerate((local(parameter), optimizer.update_of(parameter, group))):
                squares = torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
                sums[index] = sums[index].to(squares.device) + squares
    param_square, update_square = sums
    return torch.stack([param_square, update_square.where(optimizer.found_inf == 0, 0.0)])


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
