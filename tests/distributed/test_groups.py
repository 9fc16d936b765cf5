"""Process groups of a run: all have the time limit of the configuration, whatever the mesh."""

import socket

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from trainer.config import ConfigError
from trainer.runtime import distributed
from trainer.runtime.distributed import World

TIMEOUT_S = 60  # as `ranks` starts them


def limits_s(world: World) -> list[float]:
    groups = world.mesh.get_all_groups()
    limits = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]
    return [*limits, world.num_replicas]


@pytest.mark.parametrize(("fsdp_size", "num_groups", "num_replicas"), [(-1, 1, 1), (1, 2, 2)])
def test_every_group_of_the_mesh_has_the_configured_limit(fsdp_size, num_groups, num_replicas):
    expected = [TIMEOUT_S + distributed.LATE_S] * num_groups
    assert run_ranks(limits_s, 2, fsdp_size=fsdp_size) == [[*expected, num_replicas]] * 2


def refused(world: World, *cards: list[str]) -> list[str]:
    return [outcome(world, of_ranks[world.rank]) for of_ranks in cards]


def outcome(world: World, card: str) -> str:
    try:
        distributed._require_all(world.device, world.size, card=card, facts={})
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return "met"


def of_facts(world: World) -> tuple[str, str]:
    def said(facts: dict[str, str]) -> str:
        try:
            distributed._require_all(world.device, world.size, card=None, facts=facts)
        except ConfigError as error:
            return str(error)
        return "met"

    same = {"weights": "12ab", "optim.lr": "0.1"}
    differs = world.rank == 1
    different = (
        same | {"weights": "34cd" if differs else "12ab"} | ({"adapter": "56ef"} if differs else {})
    )
    return said(same), said(different)


def test_ranks_with_different_facts_are_refused_on_each_of_them_with_name_host_and_rank():
    found = run_ranks(of_facts, 3)
    host = socket.gethostname()
    assert [same for same, _ in found] == ["met"] * 3
    (message,) = {different for _, different in found}
    lines = message.splitlines()
    assert lines[1:-1] == [
        f"  weights: 12ab on {host} (rank 0), 34cd on {host} (rank 1)",
        f"  adapter: none on {host} (rank 0), 56ef on {host} (rank 1)",
    ]
    assert lines[-1].startswith("Fix: ")


def through_nothing(world: World) -> str:
    dist.all_reduce = lambda tensor: None
    return outcome(world, f"GPU-{world.rank}")


def test_a_connection_that_adds_nothing_up_is_refused():
    found = run_ranks(through_nothing, 2)
    said = "a sum of 1 over 2 ranks gave 1: their connection corrupts data"
    assert len(found) == 2 and all(text.startswith(said) for text in found)


def test_two_ranks_on_one_card_are_refused():
    shared, own = zip(*run_ranks(refused, 2, ["GPU-7", "GPU-7"], ["GPU-7", "GPU-8"]), strict=True)
    assert all("2 ranks use the same card of" in text and "GPU-7" in text for text in shared)
    assert own == ("met", "met")
