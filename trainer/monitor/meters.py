"""What ranks tell each other once per step: one packed sum, one copy to the host."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.distributed import World


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, on the host."""

    loss_sum: float
    grad_norm: float
    num_stop_requests: int
    is_save_requested: bool


@dataclass(frozen=True)
class StepSums:
    """The same still on the device, float64: loss, gradient norm, stop requests, wishes for a save."""

    values: Tensor

    @property
    def loss_sum(self) -> Tensor:
        return self.values[0]

    @property
    def grad_norm(self) -> Tensor:
        return self.values[1]

    def read(self) -> StepTotals:
        """The step's only wait for the device."""
        loss_sum, grad_norm, num_stop_requests, num_save_requests = self.values.tolist()
        return StepTotals(loss_sum, grad_norm, int(num_stop_requests), num_save_requests > 0)


def reduce_step(
    *, loss_sum: Tensor, grad_square_sum: Tensor, is_stopping: bool, wants_save: bool, world: World
) -> StepSums:
    """Add loss (summed cross-entropy), squared gradient norm and requests over ranks. Collective, one all-reduce."""
    grad_square_sum = grad_square_sum.to(loss_sum.device)  # on the host with CPU offload
    requests = [torch.full_like(grad_square_sum, float(flag)) for flag in (is_stopping, wants_save)]
    packet = torch.stack([loss_sum.double(), grad_square_sum / world.num_replicas, *requests])
    dist.all_reduce(packet)
    packet[1] = packet[1].sqrt()
    return StepSums(packet)


def reduce_loss(loss_sum: Tensor, *, is_stopping: bool) -> tuple[float, bool]:
    """(summed cross-entropy over ranks, whether any rank was asked to stop). Collective."""
    packet = torch.stack([loss_sum.double(), torch.full_like(loss_sum, float(is_stopping), dtype=torch.float64)])
    dist.all_reduce(packet)
    total, num_stop_requests = packet.tolist()
    return total, num_stop_requests > 0
