"""One packed sum over ranks in a step, and one copy to the host.

Values of single ranks travel in the same sum, each in a slot that all other ranks leave zero:
maxima, medians and the slowest rank come out of it without a second collective, and a NaN stays in
the slot of the rank that made it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.distributed import World

Value = SupportsFloat | Tensor
"""A tensor, or a number of the host."""
Values = Mapping[str, Value]


@dataclass(frozen=True)
class Totals:
    """A packet on the host, equal on all ranks."""

    sums: Mapping[str, float]
    """Scalars summed over ranks; with what was derived from the sums on the device."""
    by_rank: Mapping[str, tuple[float, ...]]
    """Field -> its value on every rank."""
    vectors: Mapping[str, np.ndarray]
    """Tensors of more than one value, summed over ranks."""


@dataclass(frozen=True)
class Packet:
    """A packet on the device, float64."""

    values: Tensor
    """All sums one after the other, then the fields of rank 0, of rank 1, …"""
    sums: Mapping[str, Tensor]
    """Views of `values`, each in its own shape."""
    fields: tuple[str, ...]

    def read(self, **derived: Tensor) -> Totals:
        """Wait for the device. `derived` scalars, made from the sums, come along."""
        extra = [value.double().reshape(1) for value in derived.values()]
        numbers = torch.cat([*extra, self.values]).tolist()
        sums = dict(zip(derived, numbers, strict=False))
        vectors = {}
        place = len(derived)
        for name, tensor in self.sums.items():
            end = place + tensor.numel()
            if tensor.ndim:
                vectors[name] = np.array(numbers[place:end]).reshape(tensor.shape)
            else:
                sums[name] = numbers[place]
            place = end
        by_rank = {
            name: tuple(numbers[place + index :: len(self.fields)])
            for index, name in enumerate(self.fields)
        }
        return Totals(sums, by_rank, vectors)


def reduce_packet(world: World, *, sums: Values, by_rank: Values | None = None) -> Packet:
    """Add up `sums` over ranks, and tell all ranks the scalars in `by_rank` of each. Collective,
    one all-reduce; names and shapes are equal on all ranks.
    """
    by_rank = by_rank or {}
    own = _on_device([*sums.values(), *by_rank.values()], world.device)
    summed, fields = own[: len(sums)], own[len(sums) :]
    slots = torch.zeros(world.size, len(fields), dtype=torch.float64, device=world.device)
    if fields:
        slots[world.rank] = torch.stack(fields)
    values = torch.cat([*(tensor.flatten() for tensor in summed), slots.flatten()])
    dist.all_reduce(values)
    pieces = values.split([*(tensor.numel() for tensor in summed), slots.numel()])
    shaped = (piece.view(own.shape) for piece, own in zip(pieces, summed, strict=False))
    return Packet(values, dict(zip(sums, shaped, strict=True)), tuple(by_rank))


def _on_device(values: list[Value], device: torch.device) -> list[Tensor]:
    """Return float64 tensors; numbers of the host go to the device in one copy.

    Which of the values are tensors may differ between ranks. With CPU offload some are on the host.
    """
    numbers = [float(value) for value in values if not isinstance(value, Tensor)]
    copied = iter(torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True).unbind())
    return [
        value.detach().to(device).double() if isinstance(value, Tensor) else next(copied)
        for value in values
    ]
