"""Which ranks share parameters, and which take equal samples."""

import pytest
import torch
from ranks import run_ranks

from trainer.config import ConfigError
from trainer.runtime.distributed import World, require_divisor

NAMES = ("data_rank", "sequence_rank", "num_data_ranks", "num_shards", "num_replicas")


def described(world):
    group = world.sequence_group
    return {
        "group": group and (group.rank(), group.size()),
        "dimensions": world.mesh.mesh_dim_names,
        **{name: getattr(world, name) for name in NAMES},
    }


def test_neighbours_take_the_same_samples_however_parameters_lie():
    alike = {"num_data_ranks": 2, "num_shards": 1, "num_replicas": 4, "dimensions": ("ddp", "fsdp")}
    assert run_ranks(described, 4, fsdp_size=1, sequence_size=2) == [
        {"data_rank": rank // 2, "sequence_rank": rank % 2, "group": (rank % 2, 2), **alike}
        for rank in range(4)
    ]


def test_the_number_of_replicas_asks_no_mesh():
    """To cut one takes longer than a kernel, and a step asks twice."""
    nowhere = None
    world = World(torch.device("cpu"), nowhere, rank=5, size=32, num_shards=8)
    assert (world.num_replicas, world.data_rank, world.num_data_ranks) == (4, 5, 32)


def test_ranks_that_do_not_make_whole_groups_are_refused():
    key = "model.ulysses_sequence_parallel_size"
    require_divisor(key, 2, 4)
    with pytest.raises(
        ConfigError, match="ulysses_sequence_parallel_size=3 does not divide the 4 ranks"
    ):
        require_divisor(key, 3, 4)
