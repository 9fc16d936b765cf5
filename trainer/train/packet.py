"""One packed sum over ranks per step, and one copy to the host.

The sum also carries values of single ranks, each in a slot that all other ranks leave at zero. So
maxima, medians and the slowest rank need no second collective, and a NaN stays in its rank's slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import SupportsFloat

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.distributed import World

Value = SupportsFloat | Tensor
"""A tensor, or a number on the host."""
Values = Mapping[str, Value]
BY_RANK = "by_rank"
"""Name of the sum that contains the slots, with shape (fields, ranks)."""


@dataclass(frozen=True)
class Totals:
    """The sums over ranks on the host, equal on all ranks."""

    sums: Mapping[str, float]
    """Scalars summed over ranks, and scalars derived from the sums on the device."""
    by_rank: Mapping[str, tuple[float, ...]]
    """Maps each field to its values on all ranks, in rank order."""
    vectors: Mapping[str, np.ndarray]
    """Tensors that are not scalars, summed over ranks."""


@dataclass(frozen=True)
class Packet:
    """The sums over ranks on the device, in float64."""

    sums: Mapping[str, Tensor]
    fields: tuple[str, ...]

    def read(self, **derived: Tensor) -> Totals:
        """Wait for the device, and return the sums and the scalars `derived` from them."""
        tensors = {**derived, **self.sums}
        packed = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
        numbers = iter(packed.tolist())
        sums = {}
        vectors = {}
        for name, tensor in tensors.items():
            if tensor.ndim:
                own = list(islice(numbers, tensor.numel()))
                vectors[name] = np.array(own).reshape(tensor.shape)
            else:
                sums[name] = next(numbers)
        slots = map(tuple, vectors.pop(BY_RANK).tolist())
        return Totals(sums, dict(zip(self.fields, slots, strict=True)), vectors)


def reduce_packet(world: World, *, sums: Values, by_rank: Values | None = None) -> Packet:
    """Sum `sums` over ranks, and collect every rank's scalars in `by_rank`.

    Collective, with one all-reduce. Names and shapes must be equal on all ranks.
    """
    fields = by_rank or {}
    own = _on_device([*sums.values(), *fields.values()], world.device)
    slots = torch.zeros(len(fields), world.size, dtype=torch.float64, device=world.device)
    if fields:
        slots[:, world.rank] = torch.stack(own[len(sums) :])
    tensors = [*own[: len(sums)], slots]
    values = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(values)
    pieces = values.split([tensor.numel() for tensor in tensors])
    reduced = {
        name: piece.view(tensor.shape)
        for name, piece, tensor in zip([*sums, BY_RANK], pieces, tensors, strict=True)
    }
    return Packet(reduced, tuple(fields))


def _on_device(values: list[Value], device: torch.device) -> list[Tensor]:
    """Return float64 tensors on the device. Numbers on the host are copied together.

    A value may be a tensor on one rank and a number on another. With CPU offload, some tensors are
    on the host.
    """
    numbers = [float(value) for value in values if not isinstance(value, Tensor)]
    on_device = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    copied = iter(on_device.unbind())
    return [
        value.detach().to(device).double() if isinstance(value, Tensor) else next(copied)
        for value in values
    ]
