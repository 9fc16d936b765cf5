"""The packet with which ranks exchange values once per step."""

import math

import pytest
import torch
from ranks import run_ranks

from trainer.train.packet import reduce_packet


def reduced(world, *own):
    """The totals of ranks that each have their own sums and other values, and what is derived from
    a sum; a float32 value must not make the sums float32.
    """
    sums, by_rank = own[world.rank]
    packet = reduce_packet(world, sums=sums, by_rank=by_rank)
    assert {tensor.dtype for tensor in packet.sums.values()} == {torch.float64}
    return packet.read(root=packet.sums["loss"].sqrt(), is_large=packet.sums["loss"] > 3)


@pytest.mark.covers("S0.9 S0.31")
def test_every_rank_sees_the_same_sums_of_scalars_and_tensors_and_the_values_of_each_rank():
    """What is a tensor on one rank may be a number on the other, and a NaN of one is seen by all."""
    vector = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    usual = {"loss": torch.tensor(1.5), "vector": vector, "num_stop_requests": False, "bad": 1.0}
    others = {"loss": torch.tensor(2.5, dtype=torch.float64), "vector": vector}
    others |= {"num_stop_requests": True, "bad": torch.tensor(math.nan)}
    own = [
        (usual, {"loss": torch.tensor(1.0), "data_s": 0.5}),
        (others, {"loss": math.nan, "data_s": torch.tensor(1.5)}),
    ]
    for totals in run_ranks(reduced, 2, *own):
        assert math.isnan(totals.sums.pop("bad"))
        expected = {"root": 2.0, "is_large": 1.0, "loss": 4.0, "num_stop_requests": 1.0}
        assert totals.sums == expected
        assert totals.vectors["vector"].tolist() == [[2.0, 4.0], [6.0, 8.0]]
        assert totals.by_rank["data_s"] == (0.5, 1.5)
        assert totals.by_rank["loss"][0] == 1.0 and math.isnan(totals.by_rank["loss"][1])
