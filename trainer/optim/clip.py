"""Global gradient norm over sharded parameters, and the update that is clipped by it.

torch's fp32 norm differs by 5e-5 between world sizes; squares summed in float64 agree to 2e-7.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_square_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Sum of squared gradient elements of this rank's shards: float64 scalar on the gradients' device."""
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def clipped_step(optimizer: torch.optim.Optimizer, *, total_norm: Tensor, loss_sum: Tensor, max_norm: float) -> None:
    """Update with gradients scaled by min(1, max_norm / total_norm), or not at all if norm or loss is not finite.

    `total_norm` (global) and `loss_sum` are scalars equal on all ranks. Both decisions are taken on the device, inside
    the fused kernel that reads the gradients anyway: the host does not wait for the backward pass before it launches
    the update. A step left out changes nothing, the optimizer's step counts included. Gradients are left scaled.
    torch's own clipping adds 1e-6 to the norm, which shifts every clipped update; this does not.
    """
    device = optimizer.param_groups[0]["params"][0].device  # the host with CPU offload
    is_finite = total_norm.isfinite() & loss_sum.isfinite()
    settings: Any = optimizer  # where torch's gradient scaler puts them too
    settings.grad_scale = (total_norm / max_norm).clamp(min=1.0).to(device, torch.float32)
    settings.found_inf = (~is_finite).to(device, torch.float32)
    optimizer.step()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
