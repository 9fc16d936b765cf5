"""The packet in which ranks tell each other values once per step."""

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks

from trainer.runtime.distributed import World
from trainer.train.packet import Totals, reduce_packet


def reduced(world: World, *sums: dict[str, Any], by_rank: tuple[Any, ...] = ()) -> Totals:
    """The totals of ranks that each have their own `sums` and `by_rank`, and what is derived from
    a sum; a float32 value must not make the sums float32.
    """
    own = by_rank[world.rank] if by_rank else None
    packet = reduce_packet(world, sums=sums[world.rank], by_rank=own)
    assert {tensor.dtype for tensor in packet.sums.values()} == {torch.float64}
    return packet.read(root=packet.sums["loss"].sqrt(), is_large=packet.sums["loss"] > 3)


@pytest.mark.covers("S0.9 S0.31")
def test_every_rank_sees_the_same_sums_of_scalars_and_of_tensors():
    vector = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    own = [
        {"loss": torch.tensor(1.5), "vector": vector, "num_stop_requests": False},
        {
            "loss": torch.tensor(2.5, dtype=torch.float64),
            "vector": vector,
            "num_stop_requests": True,
        },
    ]
    for totals in run_ranks(reduced, 2, *own):
        expected = {"root": 2.0, "is_large": 1.0, "loss": 4.0, "num_stop_requests": 1.0}
        assert totals.sums == expected and totals.by_rank == {}
        assert totals.vectors["vector"].tolist() == [[2.0, 4.0], [6.0, 8.0]]


def test_a_nan_on_one_rank_is_seen_by_all_and_named():
    sums = [{"loss": 1.0}, {"loss": torch.tensor(math.nan)}]
    # what is a tensor on one rank may be a number on the other
    by_rank = (
        {"loss": torch.tensor(1.0), "data_s": 0.5},
        {"loss": math.nan, "data_s": torch.tensor(1.5)},
    )
    for totals in run_ranks(reduced, 2, *sums, by_rank=by_rank):
        assert math.isnan(totals.sums["loss"]) and totals.by_rank["data_s"] == (0.5, 1.5)
        assert totals.by_rank["loss"][0] == 1.0 and math.isnan(totals.by_rank["loss"][1])
