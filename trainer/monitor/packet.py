"""What ranks tell each other at once: one packed sum, one copy to the host.

Values of single ranks travel in the same sum, each in a slot that all other ranks leave zero:
maxima, medians and the slowest rank come out of it without a second collective, and a NaN stays in
the slot of the rank that made it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.distributed import World

Scalars = Mapping[str, SupportsFloat]
"""Tensors of one value, or numbers of the host."""


@dataclass(frozen=True)
class Totals:
    """A packet on the host, equal on all ranks."""

    sums: Mapping[str, float]
    """Over ranks; with what was derived from them on the device."""
    by_rank: Mapping[str, tuple[float, ...]]
    """Field -> its value on every rank."""


@dataclass(frozen=True)
class Packet:
    """The same still on the device, float64: the named sums, then the fields of every rank."""

    values: Tensor
    names: tuple[str, ...]
    fields: tuple[str, ...]
    vector: Tensor
    """Summed too; it stays on the device."""

    def sum_of(self, name: str) -> Tensor:
        return self.values[self.names.index(name)]

    def read(self, **derived: Tensor) -> Totals:
        """Wait for the device. `derived`: scalars made from the sums, which come along."""
        extra = [value.double() for value in derived.values()]
        values = torch.cat([*([torch.stack(extra)] if extra else []), self.values]).tolist()
        names = (*derived, *self.names)
        slots = values[len(names) :]
        return Totals(
            sums=dict(zip(names, values, strict=False)),
            by_rank={
                name: tuple(slots[index :: len(self.fields)])
                for index, name in enumerate(self.fields)
            },
        )


def reduce_packet(
    world: World, *, sums: Scalars, by_rank: Scalars | None = None, vector: Tensor | None = None
) -> Packet:
    """Add up `sums` and `vector` over ranks, and tell all ranks this one's `by_rank`. Collective,
    one all-reduce; names and shapes are equal on all ranks.
    """
    names, totals = _packed(sums, world.device)
    fields, own = _packed(by_rank or {}, world.device)
    slots = torch.zeros(world.size, len(fields), dtype=torch.float64, device=world.device)
    slots[world.rank] = own
    parts = (
        torch.cat([totals, slots.flatten()]),
        totals.new_zeros(0) if vector is None else vector.double().flatten(),
    )
    whole = torch.cat(parts)
    dist.all_reduce(whole)
    values, summed = whole.split([len(part) for part in parts])
    return Packet(values, names, fields, summed)


def _packed(scalars: Scalars, device: torch.device) -> tuple[tuple[str, ...], Tensor]:
    """(Names, values as a float64 vector), in the order given; what the host knows goes to the
    device in one copy.

    Which of them are tensors may differ between ranks.
    """
    numbers = [float(value) for value in scalars.values() if not isinstance(value, Tensor)]
    copied = iter(torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True).unbind())
    own = [
        value.detach().to(device).double().reshape(())  # with CPU offload it is on the host
        if isinstance(value, Tensor)
        else next(copied)
        for value in scalars.values()
    ]
    return tuple(scalars), torch.stack(own) if own else torch.zeros(
        0, dtype=torch.float64, device=device
    )


def loss_key(source: str) -> str:
    """Name in a packet of the summed loss of a source."""
    return f"loss_sum/{source}"


def losses_by_source(
    sums: Mapping[str, float], loss_tokens_by: Mapping[str, int]
) -> dict[str, float]:
    """Mean loss of each source that has supervised tokens: `loss_by/<source>`."""
    return {
        f"loss_by/{name}": sums[loss_key(name)] / count
        for name, count in loss_tokens_by.items()
        if count
    }
