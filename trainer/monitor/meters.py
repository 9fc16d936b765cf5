"""What ranks tell each other once per step: one packed sum, one copy to the host."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.distributed import World


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, on the host; `grad_norm_device` is the norm as a float64 scalar on the device."""

    loss_sum: float
    grad_norm: float
    num_stop_requests: int
    is_save_requested: bool
    grad_norm_device: Tensor


def reduce_step(
    *, loss_sum: Tensor, grad_square_sum: Tensor, is_stopping: bool, wants_save: bool, world: World
) -> StepTotals:
    """Add loss (summed cross-entropy), squared gradient norm and requests over ranks. Collective, one all-reduce.

    This is the step's only wait for the device.
    """
    grad_square_sum = grad_square_sum.to(loss_sum.device)  # on the host with CPU offload
    requests = [torch.full_like(grad_square_sum, float(flag)) for flag in (is_stopping, wants_save)]
    packet = torch.stack([loss_sum.double(), grad_square_sum / world.num_replicas, *requests])
    dist.all_reduce(packet)
    norm = packet[1].sqrt()
    loss_total, grad_norm, num_stop_requests, num_save_requests = torch.stack([packet[0], norm, *packet[2:]]).tolist()
    return StepTotals(
        loss_sum=loss_total,
        grad_norm=grad_norm,
        num_stop_requests=int(num_stop_requests),
        is_save_requested=num_save_requests > 0,
        grad_norm_device=norm,
    )


def reduce_loss(loss_sum: Tensor, *, is_stopping: bool) -> tuple[float, bool]:
    """(summed cross-entropy over ranks, whether any rank was asked to stop). Collective."""
    packet = torch.stack([loss_sum.double(), torch.full_like(loss_sum, float(is_stopping), dtype=torch.float64)])
    dist.all_reduce(packet)
    total, num_stop_requests = packet.tolist()
    return total, num_stop_requests > 0
