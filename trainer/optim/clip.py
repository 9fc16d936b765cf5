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


def clipped_step(optimizer: torch.optim.Optimizer, *, total_norm: Tensor, is_skipped: Tensor, max_norm: float) -> None:
    """Update with gradients scaled by min(1, max_norm / total_norm), or not at all where `is_skipped` holds.

    `total_norm` (global) and `is_skipped` are scalars equal on all ranks. Both act on the device, inside the fused
    kernel that reads the gradients anyway: the host does not wait for the backward pass before it launches the update.
    A step left out changes nothing, the optimizer's step counts included. Gradients are left scaled.
    torch's own clipping adds 1e-6 to the norm, which shifts every clipped update; this does not.
    """
    device = optimizer.param_groups[0]["params"][0].device  # the host with CPU offload
    settings: Any = optimizer  # where torch's gradient scaler puts them too
    settings.grad_scale = (total_norm / max_norm).clamp(min=1.0).to(device, torch.float32)
    settings.found_inf = is_skipped.to(device, torch.float32)
    optimizer.step()


def norm_squares(optimizer: torch.optim.AdamW) -> Tensor:
    """Squared norms of this rank's shards of the parameters and of AdamW's last update of them, float64 [2].

    The update is recomputed from the moments: lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * w), with w
    after it instead of before. One pass over the shards, one temporary of a parameter's size.
    """
    sums = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            weight, mean, square = (_local(t).detach() for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
            step = state["step"].to(weight.device)
            root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (mean / (1 - beta1**step)).div_(root).add_(weight, alpha=group["weight_decay"]).mul_(group["lr"])
            for index, tensor in enumerate((weight, update)):
                squares = torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
                sums[index] = sums[index].to(squares.device) + squares
    return torch.stack(sums)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
