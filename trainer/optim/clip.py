"""Global gradient norm over sharded parameters, and the update that uses it for clipping.

torch's fp32 norm differs by 5e-5 between world sizes; squares summed in float64 agree to 2e-7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.model.weights import local


class Optimizer(torch.optim.Optimizer):
    """An optimizer with extra inputs that torch's interface lacks.

    `step` reads two scalars on the device, as torch's fused optimizers do. Gradients are divided by
    `grad_scale`. If `found_inf` is not 0, nothing changes, including momentum and step counts.
    `rounding_key`, different in each step, determines how results in bfloat16 are rounded.
    """

    grad_scale: Tensor
    found_inf: Tensor
    rounding_key: int


def local_square_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of squared gradient elements of this rank's shards: float64 scalar on the
    gradients' device.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    return square_sum(grads)


@torch.no_grad()
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squared elements of this rank's shards: float64 scalar on their device."""
    norms = torch._foreach_norm([local(tensor) for tensor in tensors], 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def clipped_step(
    optimizer: Optimizer,
    *,
    total_norm: Tensor,
    is_skipped: Tensor,
    max_norm: float,
    rounding_key: int,
) -> None:
    """Update with gradients scaled by min(1, max_norm / total_norm), or not at all if `is_skipped`.

    `total_norm` (global) and `is_skipped` are scalars, equal on all ranks. Both act on the device,
    so the host does not wait for the backward pass before it launches the update. A skipped step
    changes nothing, including the optimizer's step counts. Gradients are left scaled. torch's own
    clipping adds 1e-6 to the norm, which shifts every clipped update; this function does not.
    """
    # with CPU offload, this is the host
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    optimizer.grad_scale = (total_norm / max_norm).clamp(min=1.0).to(device, torch.float32)
    optimizer.found_inf = is_skipped.to(device, torch.float32)
    optimizer.rounding_key = rounding_key
    optimizer.step()
