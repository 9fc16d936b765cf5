"""What ranks tell each other once per step: one packed sum, one copy to the host.

Values of single ranks travel in the same sum, each in a slot that all other ranks leave zero: maxima, medians and the
slowest rank come out of it without a second collective, and a NaN stays in the slot of the rank that made it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.detection import Limits
from trainer.runtime.distributed import World

TOTALS = ("loss_sum", "grad_norm", "num_stop_requests", "num_save_requests", "param_norm", "update_norm")
DEVICE_FIELDS = ("loss_sum", "num_nonfinite")
HOST_FIELDS = (
    "num_loss_tokens",
    "data_s",
    "rss_gib",
    "vms_gib",
    "allocated_gib",
    "reserved_gib",
    "max_allocated_gib",
    "max_reserved_gib",
    "alloc_retries",
    "ooms",
    "gpu_util",
    "gpu_mem_util",
    "gpu_temp_c",
    "gpu_power_w",
    "decisions",
)
"""What each rank says of itself; what it does not know is 0."""


@dataclass(frozen=True)
class StepTotals:
    """One step's packet on the host, equal on all ranks."""

    loss_sum: float
    grad_norm: float
    num_stop_requests: int
    is_save_requested: bool
    param_norm: float
    """Of the weights before this step's update, and of the update before; both 0 in a step that did not measure."""
    update_norm: float
    is_skipped: bool
    """The update was left out, on the device and by the same values."""
    by_rank: Mapping[str, tuple[float, ...]]
    """Field -> its value on every rank."""


@dataclass(frozen=True)
class StepSums:
    """The same still on the device, float64: `TOTALS`, then the fields of every rank."""

    values: Tensor
    is_skipped: Tensor
    """Boolean scalar: loss or norm is not finite, or beyond the limits of this step."""

    @property
    def loss_sum(self) -> Tensor:
        return self.values[0]

    @property
    def grad_norm(self) -> Tensor:
        return self.values[1]

    def read(self) -> StepTotals:
        """The step's only wait for the device."""
        *values, is_skipped = torch.cat([self.values, self.is_skipped.double()[None]]).tolist()
        totals = dict(zip(TOTALS, values, strict=False))
        fields = (*DEVICE_FIELDS, *HOST_FIELDS)
        slots = values[len(TOTALS) :]
        return StepTotals(
            loss_sum=totals["loss_sum"],
            grad_norm=totals["grad_norm"],
            num_stop_requests=int(totals["num_stop_requests"]),
            is_save_requested=totals["num_save_requests"] > 0,
            param_norm=totals["param_norm"],
            update_norm=totals["update_norm"],
            is_skipped=bool(is_skipped),
            by_rank={name: tuple(slots[index :: len(fields)]) for index, name in enumerate(fields)},
        )


def reduce_step(
    *,
    loss_sum: Tensor,
    num_nonfinite: Tensor,
    grad_square_sum: Tensor,
    norm_squares: Tensor | None,
    is_stopping: bool,
    wants_save: bool,
    num_loss_tokens: int,
    limits: Limits,
    local: Mapping[str, float],
    world: World,
) -> StepSums:
    """Add up what ranks know of a step, and decide whether its update is left out. Collective, one all-reduce.

    `loss_sum` (summed cross-entropy) and `num_nonfinite` (micro-batches whose loss is not finite) are this rank's, as
    is `grad_square_sum`, the squared norm of its gradient shards, and `norm_squares`, those of parameters and of the
    last update (a tensor of two, or None). `num_loss_tokens` counts the global batch; `local` holds any `HOST_FIELDS`.
    """
    device = loss_sum.device
    requests = [torch.full_like(grad_square_sum, float(flag), device=device) for flag in (is_stopping, wants_save)]
    squares = torch.zeros(2, dtype=torch.float64, device=device) if norm_squares is None else norm_squares.to(device)
    grad_square_sum = grad_square_sum.to(device)  # on the host with CPU offload
    totals = torch.stack([loss_sum.double(), grad_square_sum / world.num_replicas, *requests])
    measured = torch.tensor([local.get(name, 0.0) for name in HOST_FIELDS], dtype=torch.float64)
    own = torch.cat([torch.stack([loss_sum.double(), num_nonfinite.double()]), measured.to(device, non_blocking=True)])
    slots = torch.zeros(world.size, len(own), dtype=torch.float64, device=device)
    slots[world.rank] = own
    packet = torch.cat([totals, squares / world.num_replicas, slots.flatten()])
    dist.all_reduce(packet)
    packet[1] = packet[1].sqrt()
    packet[4:6] = packet[4:6].sqrt()
    return StepSums(packet, _is_skipped(packet[0] / num_loss_tokens, packet[1], limits))


def _is_skipped(loss: Tensor, grad_norm: Tensor, limits: Limits) -> Tensor:
    is_finite = loss.isfinite() & grad_norm.isfinite()
    is_severe = (loss > limits.loss_with_grad) & (grad_norm > limits.grad_with_loss)
    return ~is_finite | is_severe | (loss > limits.loss_alone) | (grad_norm > limits.grad_alone)


def reduce_sums(sums: Tensor, *, is_stopping: bool) -> tuple[list[float], bool]:
    """(float64 `sums` over ranks, whether any rank was asked to stop). Collective; a validation step's only wait."""
    packet = torch.cat([sums, torch.full_like(sums[:1], float(is_stopping))])
    dist.all_reduce(packet)
    *totals, num_stop_requests = packet.tolist()
    return totals, num_stop_requests > 0
