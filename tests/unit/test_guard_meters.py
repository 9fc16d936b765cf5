"""What happens to a step that is not a number, and what ranks tell each other once per step."""

import math

import pytest
import torch
from ranks import run_ranks

from trainer.monitor.guard import NonFiniteGuard
from trainer.monitor.memory import memory_metrics
from trainer.monitor.meters import reduce_loss, reduce_step
from trainer.runtime.distributed import World

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(("loss", "grad_norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF), (NAN, NAN)])
def test_guard_counts_what_is_not_finite(loss: float, grad_norm: float) -> None:
    guard = NonFiniteGuard(max_in_a_row=2)
    guard.count(loss=1e30, grad_norm=0.0)
    assert guard.num_skipped == 0
    guard.count(loss=loss, grad_norm=grad_norm)
    assert (guard.num_skipped, guard.num_in_a_row, guard.is_exhausted) == (1, 1, False)


def test_guard_gives_up_only_after_steps_in_a_row() -> None:
    guard = NonFiniteGuard(max_in_a_row=2)
    for loss in (NAN, 1.0, NAN, 2.0):
        guard.count(loss=loss, grad_norm=1.0)
        assert not guard.is_exhausted
    guard.count(loss=NAN, grad_norm=1.0)
    guard.count(loss=NAN, grad_norm=1.0)
    assert guard.is_exhausted and guard.num_skipped == 4


def test_guard_survives_a_restart() -> None:
    guard = NonFiniteGuard(max_in_a_row=3)
    for loss in (NAN, 1.0, NAN, NAN):
        guard.count(loss=loss, grad_norm=1.0)
    resumed = NonFiniteGuard(max_in_a_row=3)
    resumed.load_state_dict(guard.state_dict())
    assert (resumed.num_skipped, resumed.num_in_a_row) == (3, 2)
    resumed.count(loss=NAN, grad_norm=1.0)
    assert resumed.is_exhausted, "the steps before the restart count"


def reduced(world: World, losses: list[float], squares: list[float], stopping: list[bool]) -> dict[str, float]:
    """Each rank's own share goes in; a float32 loss must not make the sum float32."""
    sums = reduce_step(
        loss_sum=torch.tensor(losses[world.rank], dtype=torch.float32),
        grad_square_sum=torch.tensor(squares[world.rank], dtype=torch.float64),
        is_stopping=stopping[world.rank],
        wants_save=world.is_main and stopping[-1],
        world=world,
    )
    totals = sums.read()
    assert totals.is_save_requested == stopping[-1], "the main rank's wish is known to all"
    assert sums.grad_norm.dtype == sums.loss_sum.dtype == torch.float64
    assert float(sums.grad_norm) == totals.grad_norm and float(sums.loss_sum) == totals.loss_sum
    loss, is_any_stopping = reduce_loss(torch.tensor(losses[world.rank]), is_stopping=stopping[world.rank])
    assert loss == totals.loss_sum
    return {
        "loss_sum": totals.loss_sum,
        "grad_norm": totals.grad_norm,
        "num_stop_requests": totals.num_stop_requests,
        "is_any_stopping": is_any_stopping,
    }


@pytest.mark.covers("S0.9", "S3.10")
def test_every_rank_sees_the_same_sums() -> None:
    first, second = run_ranks(reduced, 2, [1.5, 2.0], [9.0, 16.0], [False, False])
    assert first == second
    assert first == {"loss_sum": 3.5, "grad_norm": 5.0, "num_stop_requests": 0, "is_any_stopping": False}


def test_a_stop_request_of_any_rank_reaches_all() -> None:
    for totals in run_ranks(reduced, 2, [1.0, 1.0], [1.0, 1.0], [False, True]):
        assert totals["num_stop_requests"] == 1 and totals["is_any_stopping"]


@pytest.mark.covers("S3.8")
def test_replicas_do_not_count_their_gradient_twice() -> None:
    """Two copies of the parameters on one rank each: both hold the whole summed gradient, of norm 5."""
    for totals in run_ranks(reduced, 2, [1.0, 2.0], [25.0, 25.0], [False, False], fsdp_size=1):
        assert totals["grad_norm"] == 5.0
        assert totals["loss_sum"] == 3.0, "the loss is each rank's own part, replica or not"


def test_a_nan_on_one_rank_is_seen_by_all() -> None:
    for totals in run_ranks(reduced_nan, 2):
        assert math.isnan(totals[0]) and math.isinf(totals[1])


def reduced_nan(world: World) -> tuple[float, float]:
    value = torch.tensor(NAN if world.rank else 1.0)
    square = torch.tensor(1.0 if world.rank else INF, dtype=torch.float64)
    sums = reduce_step(loss_sum=value, grad_square_sum=square, is_stopping=False, wants_save=False, world=world)
    totals = sums.read()
    return totals.loss_sum, totals.grad_norm


def test_memory_is_reported_in_gib() -> None:
    metrics = memory_metrics(torch.device("cpu"))
    assert set(metrics) == {"memory/cpu/rss_gib"}
    assert 0.01 < metrics["memory/cpu/rss_gib"] < 1000
