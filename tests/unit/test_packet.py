"""The packet in which ranks tell each other values once per step."""

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks

from trainer.monitor.packet import Totals, loss_key, losses_by_source, reduce_packet
from trainer.runtime.distributed import World

NAN = math.nan


def reduced(
    world: World, losses: list[float], squares: list[float], stopping: list[bool]
) -> Totals:
    """Each rank's own share goes in; a float32 loss must not make the sum float32."""
    packet = reduce_packet(
        world,
        sums={
            "num_stop_requests": stopping[world.rank],
            "loss_sum": torch.tensor(losses[world.rank], dtype=torch.float32),
            "grad_square_sum": torch.tensor(squares[world.rank], dtype=torch.float64),
        },
    )
    loss, norm = packet.sum_of("loss_sum"), packet.sum_of("grad_square_sum").sqrt()
    assert loss.dtype == norm.dtype == torch.float64
    totals = packet.read(grad_norm=norm, is_large=norm > 4)
    assert totals.sums["loss_sum"] == float(loss) and totals.sums["grad_norm"] == float(norm)
    assert totals.sums["is_large"] == float(norm > 4) and totals.by_rank == {}
    return totals


@pytest.mark.covers("S0.9", "S0.31")
def test_every_rank_sees_the_same_sums() -> None:
    first, second = run_ranks(reduced, 2, [1.5, 2.0], [9.0, 16.0], [False, False])
    assert first == second
    sums = {"loss_sum": 3.5, "grad_square_sum": 25.0, "num_stop_requests": 0.0}
    assert first.sums == {"grad_norm": 5.0, "is_large": 1.0, **sums}


def test_a_stop_request_of_any_rank_reaches_all() -> None:
    for totals in run_ranks(reduced, 2, [1.0, 1.0], [1.0, 1.0], [False, True]):
        assert totals.sums["num_stop_requests"] == 1


def test_a_nan_on_one_rank_is_seen_by_all_and_named() -> None:
    for sums, by_rank in run_ranks(reduced_nan, 2):
        assert math.isnan(sums["loss_sum"])
        assert by_rank["loss_sum"][0] == 1.0 and math.isnan(by_rank["loss_sum"][1]), (
            "the other rank's is untouched"
        )
        assert by_rank["num_nonfinite"] == (0.0, 1.0) and by_rank["data_s"] == (0.5, 1.5)


def reduced_nan(world: World) -> tuple[Any, Any]:
    loss_sum = torch.tensor(NAN if world.rank else 1.0)
    own = {
        "data_s": 0.5 + world.rank,
        "loss_sum": loss_sum,
        "num_nonfinite": torch.tensor(float(world.rank)),
    }
    totals = reduce_packet(world, sums={"loss_sum": loss_sum}, by_rank=own).read()
    return totals.sums, totals.by_rank


def test_a_source_without_supervised_tokens_in_the_batch_has_no_loss() -> None:
    sums = {loss_key("a"): 6.0, loss_key("b"): 0.0}
    assert losses_by_source(sums, {"a": 3, "b": 0}) == {"loss_by/a": 2.0}
    assert losses_by_source({}, {}) == {}


def test_what_is_a_tensor_on_one_rank_may_be_a_number_on_another() -> None:
    for by_rank in run_ranks(mixed, 2):
        assert by_rank == {"a": (0.0, 1.0), "b": (10.0, 11.0), "c": (20.0, 21.0)}


def mixed(world: World) -> dict[str, Any]:
    values = {name: 10.0 * place + world.rank for place, name in enumerate("abc")}
    values["abc"[world.rank]] = torch.tensor(values["abc"[world.rank]])  # type: ignore[assignment]
    return dict(reduce_packet(world, sums={"one": 1.0}, by_rank=values).read().by_rank)
