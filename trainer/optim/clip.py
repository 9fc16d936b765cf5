"""Global gradient norm over sharded parameters.

torch's fp32 norm differs by 5e-5 between world sizes; squares summed in float64 agree to 2e-7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_square_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Sum of squared gradient elements of this rank's shards: float64 scalar on the gradients' device."""
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def clip_by_norm(parameters: Sequence[nn.Parameter], *, total_norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / total_norm), on the device, without looking at the value.

    `total_norm` is the global norm, a scalar equal on all ranks. torch adds 1e-6 to it, which shifts every clipped
    update; without it a norm of 0 gives an infinite quotient, and the minimum is 1 all the same.
    """
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    scale = (max_norm / total_norm).clamp(max=1.0).to(torch.float32)
    torch._foreach_mul_(grads, scale.to(grads[0].device))  # gradients are on the host with CPU offload


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
