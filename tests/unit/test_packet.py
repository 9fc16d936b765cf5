"""What ranks tell each other once per step, and the decision to leave an update out."""

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks

from trainer.detection import Limits
from trainer.monitor.packet import StepSums, reduce_step, reduce_sums
from trainer.runtime.distributed import World

INF, NAN = math.inf, math.nan


def step_sums(world: World, loss_sum: Any, square: Any, **changes: Any) -> StepSums:
    arguments: dict[str, Any] = {
        "loss_sum": torch.as_tensor(loss_sum, dtype=torch.float32),
        "num_nonfinite": torch.tensor(0.0, dtype=torch.float64),
        "grad_square_sum": torch.as_tensor(square, dtype=torch.float64),
        "norm_squares": None,
        "is_stopping": False,
        "wants_save": False,
        "num_loss_tokens": 1,
        "limits": Limits(),
        "local": {},
        "world": world,
    }
    return reduce_step(**(arguments | changes))


def reduced(world: World, losses: list[float], squares: list[float], stopping: list[bool]) -> dict[str, float]:
    """Each rank's own share goes in; a float32 loss must not make the sum float32."""
    sums = step_sums(
        world,
        losses[world.rank],
        squares[world.rank],
        is_stopping=stopping[world.rank],
        wants_save=world.is_main and stopping[-1],
    )
    totals = sums.read()
    assert totals.is_save_requested == stopping[-1], "the main rank's wish is known to all"
    assert sums.grad_norm.dtype == sums.loss_sum.dtype == torch.float64
    assert float(sums.grad_norm) == totals.grad_norm and float(sums.loss_sum) == totals.loss_sum
    own = torch.tensor([losses[world.rank]], dtype=torch.float64)
    (loss,), is_any_stopping = reduce_sums(own, is_stopping=stopping[world.rank])
    assert loss == totals.loss_sum
    return {
        "loss_sum": totals.loss_sum,
        "grad_norm": totals.grad_norm,
        "num_stop_requests": totals.num_stop_requests,
        "is_any_stopping": is_any_stopping,
    }


@pytest.mark.covers("S0.9", "S0.31")
def test_every_rank_sees_the_same_sums() -> None:
    first, second = run_ranks(reduced, 2, [1.5, 2.0], [9.0, 16.0], [False, False])
    assert first == second
    assert first == {"loss_sum": 3.5, "grad_norm": 5.0, "num_stop_requests": 0, "is_any_stopping": False}


def test_a_stop_request_of_any_rank_reaches_all() -> None:
    for totals in run_ranks(reduced, 2, [1.0, 1.0], [1.0, 1.0], [False, True]):
        assert totals["num_stop_requests"] == 1 and totals["is_any_stopping"]


def test_replicas_do_not_count_their_gradient_twice() -> None:
    """Two copies of the parameters on one rank each: both hold the whole summed gradient, of norm 5."""
    for totals in run_ranks(reduced, 2, [1.0, 2.0], [25.0, 25.0], [False, False], fsdp_size=1):
        assert totals["grad_norm"] == 5.0
        assert totals["loss_sum"] == 3.0, "the loss is each rank's own part, replica or not"


def test_a_nan_on_one_rank_is_seen_by_all_and_named() -> None:
    for loss_sum, grad_norm, is_skipped, by_rank in run_ranks(reduced_nan, 2):
        assert math.isnan(loss_sum) and math.isinf(grad_norm) and is_skipped
        assert by_rank["loss_sum"][0] == 1.0 and math.isnan(by_rank["loss_sum"][1]), "the other rank's is untouched"
        assert by_rank["num_nonfinite"] == (0.0, 1.0)
        assert by_rank["data_s"] == (0.5, 1.5) and by_rank["rss_gib"] == (0.0, 0.0)


def reduced_nan(world: World) -> tuple[float, float, bool, dict[str, Any]]:
    totals = step_sums(
        world,
        NAN if world.rank else 1.0,
        1.0 if world.rank else INF,
        num_nonfinite=torch.tensor(float(world.rank), dtype=torch.float64),
        local={"data_s": 0.5 + world.rank},
    ).read()
    return totals.loss_sum, totals.grad_norm, totals.is_skipped, dict(totals.by_rank)


def test_norms_that_travel_with_a_step_are_those_of_all_shards() -> None:
    for param_norm, update_norm in run_ranks(reduced_norms, 2):
        assert (param_norm, update_norm) == (5.0, 13.0)


def reduced_norms(world: World) -> tuple[float, float]:
    squares = torch.tensor([[9.0, 25.0], [16.0, 144.0]][world.rank], dtype=torch.float64)
    totals = step_sums(world, 1.0, 1.0, norm_squares=squares).read()
    return totals.param_norm, totals.update_norm


LIMITS = Limits(loss_with_grad=2.0, grad_with_loss=10.0, loss_alone=5.0, grad_alone=100.0)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "is_skipped"),
    [
        (1.9, 99.0, False),
        (2.1, 10.1, True),
        (2.1, 9.9, False),
        (5.1, 1.0, True),
        (1.0, 100.1, True),
        (NAN, 1.0, True),
        (1.0, INF, True),
    ],
)
def test_the_device_skips_by_the_rule_of_the_limits(loss: float, grad_norm: float, is_skipped: bool) -> None:
    assert run_ranks(skipped, 1, loss, grad_norm) == [is_skipped]
    if math.isfinite(loss + grad_norm):
        assert LIMITS.is_severe(loss=loss, grad_norm=grad_norm) == is_skipped


def skipped(world: World, loss: float, grad_norm: float) -> bool:
    """The loss is a mean: ten tokens of it."""
    sums = step_sums(world, 10 * loss, grad_norm**2, num_loss_tokens=10, limits=LIMITS)
    assert bool(sums.is_skipped) == sums.read().is_skipped
    return sums.read().is_skipped
