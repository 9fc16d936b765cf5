"""Process groups of a run: all of them have the configured time limit, for any mesh."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from trainer.config import ConfigError
from trainer.runtime import distributed

TIMEOUT_S = 60  # as `ranks` starts them


def limits_s(world):
    groups = world.mesh.get_all_groups()
    limits = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]
    return [*limits, world.num_replicas]


@pytest.mark.parametrize(("fsdp_size", "num_groups", "num_replicas"), [(-1, 1, 1), (1, 2, 2)])
def test_every_group_of_the_mesh_has_the_configured_limit(fsdp_size, num_groups, num_replicas):
    expected = [TIMEOUT_S + distributed.LATE_S] * num_groups
    assert run_ranks(limits_s, 2, fsdp_size=fsdp_size) == [[*expected, num_replicas]] * 2


def refused(world, *cards):
    return [outcome(world, of_ranks[world.rank]) for of_ranks in cards]


def outcome(world, card):
    try:
        distributed._require_all(world.device, world.size, card=card, facts={})
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return "met"


def through_nothing(world):
    dist.all_reduce = lambda tensor: None
    return outcome(world, f"GPU-{world.rank}")


def test_a_connection_that_adds_nothing_up_is_refused():
    found = run_ranks(through_nothing, 2)
    said = "a sum of 1 over 2 ranks returned 1: the connection between them corrupts data"
    assert len(found) == 2 and all(text.startswith(said) for text in found)


def test_two_ranks_on_one_card_are_refused():
    shared, own = zip(*run_ranks(refused, 2, ["GPU-7", "GPU-7"], ["GPU-7", "GPU-8"]), strict=True)
    assert all(
        "2 ranks on" in text and "use the same GPU" in text and "GPU-7" in text for text in shared
    )
    assert own == ("met", "met")
