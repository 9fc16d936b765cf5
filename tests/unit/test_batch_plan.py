"""The plan: every sample exactly once, within the limits, evenly dealt; properties over random
batches.
"""

import itertools

import numpy as np
import pytest

from trainer.config import ConfigError
from trainer.data.batch_plan import Limits, RankPlan, Schedule
from trainer.data.order import Share

NUM_CASES = 150
Dealt = list[list[list[int]]]


def random_case(seed: int) -> tuple[np.ndarray, int, Limits, float]:
    """(lengths, ranks, limits, quadratic cost): short and long tails, tight and absent limits,
    few and many ranks.
    """
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 80))
    lengths = np.ceil(rng.pareto(1.5, num_samples) * 50 + 1).clip(1, 2000).astype(np.int64)
    if rng.random() < 0.2:
        lengths[:] = lengths[0]
    longest = int(lengths.max())
    max_tokens = [None, longest, longest * 2, longest * 10][rng.integers(4)]
    max_samples = [None, 1, 3, 16][rng.integers(4)]
    return (
        lengths,
        int(rng.integers(1, 9)),
        Limits(max_tokens, max_samples),
        float(rng.choice([0.0, 1e-4, 1e-2])),
    )


def cost_of(lengths: np.ndarray, quadratic_cost: float) -> np.ndarray:
    return lengths + quadratic_cost * lengths.astype(np.float64) ** 2


@pytest.fixture(params=range(NUM_CASES))
def case(request: pytest.FixtureRequest) -> tuple[np.ndarray, int, Limits, float, Dealt]:
    lengths, world_size, limits, quadratic_cost = random_case(request.param)
    print(
        f"seed {request.param}: {len(lengths)} samples, {world_size} ranks, {limits}, quadratic "
        f"{quadratic_cost}"
    )
    dealt = RankPlan(0, world_size, limits, quadratic_cost).deal(lengths)
    return lengths, world_size, limits, quadratic_cost, dealt


def test_split_keeps_every_promise(case: tuple[np.ndarray, int, Limits, float, Dealt]) -> None:
    lengths, world_size, limits, quadratic_cost, dealt = case
    micro_batches = list(itertools.chain(*dealt))

    assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths))), (
        "every index exactly once"
    )
    assert len(dealt) == world_size
    assert len({len(rank) for rank in dealt}) == 1, (
        "collectives need as many micro-batches on every rank"
    )
    for members in micro_batches:
        assert limits.max_tokens is None or lengths[members].sum() <= limits.max_tokens
        assert limits.max_samples is None or len(members) <= limits.max_samples
    again = RankPlan(0, world_size, limits, quadratic_cost).deal(lengths)
    assert again == dealt, "ranks plan alone and must come to the same plan"


def test_split_balances_the_ranks(case: tuple[np.ndarray, int, Limits, float, Dealt]) -> None:
    lengths, _, _, quadratic_cost, dealt = case
    costs = cost_of(lengths, quadratic_cost)
    per_rank = [sum(float(costs[members].sum()) for members in rank) for rank in dealt]
    assert max(per_rank) <= np.mean(per_rank) + costs.max() + 1e-6, per_rank


def test_split_uses_no_more_micro_batches_than_twice_the_least() -> None:
    for seed in range(NUM_CASES):
        lengths, world_size, limits, quadratic_cost = random_case(seed)
        dealt = RankPlan(0, world_size, limits, quadratic_cost).deal(lengths)
        by_tokens = lengths.sum() / limits.max_tokens if limits.max_tokens else 1
        by_samples = len(lengths) / limits.max_samples if limits.max_samples else 1
        least = max(1, np.ceil(max(by_tokens, by_samples) / world_size))
        assert len(dealt[0]) <= 2 * least + 1, f"seed {seed}"


def test_a_sample_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"a sample of 9 tokens exceeds data\.max_token_len_per_gpu=8; raise it"
    ):
        RankPlan(0, 2, Limits(8, None), 0.0).deal(np.array([3, 9, 4]))
    RankPlan(0, 2, Limits(9, None), 0.0).deal(np.array([3, 9, 4]))


@pytest.mark.parametrize(
    ("num_samples", "batch_size"), [(10, 5), (10, 4), (1, 1), (1, 8), (7, 100), (3, 1)]
)
def test_every_epoch_is_a_permutation(num_samples: int, batch_size: int) -> None:
    schedule = Schedule((Share(num_samples),), batch_size, seed=5)
    per_epoch = -(-num_samples // batch_size)
    assert schedule.steps_per_epoch == per_epoch
    for epoch in range(4):
        batches = [
            schedule.rows(step)
            for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        ]
        assert sorted(np.concatenate(batches)) == list(range(num_samples))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (per_epoch - 1)
        assert len(batches[-1]) == num_samples - batch_size * (per_epoch - 1)


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        schedule = Schedule((Share(50),), 50, seed=seed)
        return schedule.rows(epoch + 1).tolist()

    assert order(1, 0) == order(1, 0)
    assert len({str(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    small = [Schedule((Share(50),), 7, seed=1).rows(step) for step in range(1, 9)]
    assert np.concatenate(small).tolist() == order(1, 0), (
        "the batch size only cuts the order, it does not change it"
    )


@pytest.mark.parametrize("num_samples", [1, 7, 8, 24])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 30])
def test_a_schedule_continued_anywhere_goes_on_as_it_would_have(
    num_samples: int, batch_size: int
) -> None:
    whole = Schedule((Share(num_samples),), batch_size, seed=2)
    total_steps = whole.steps_until(3)
    assert total_steps == 3 * whole.steps_per_epoch
    for step in range(total_steps):
        again = Schedule((Share(num_samples),), batch_size, seed=2, start=whole.position(step))
        assert again.steps_until(3) == total_steps
        for later in {step, min(step + 1, total_steps - 1), total_steps - 1}:
            assert again.position(later) == whole.position(later)
            assert np.array_equal(again.rows(later + 1), whole.rows(later + 1))


def test_a_long_sample_costs_what_its_sliding_window_leaves() -> None:
    """Of 300 tokens with a window of 100 as much as five of 100, not as nine."""
    lengths = np.array([300, *[100] * 7])
    windowed = RankPlan(0, 2, Limits(None, None), 0.0, {100: 1.0}).deal(lengths)
    whole = RankPlan(0, 2, Limits(None, None), 1.0).deal(lengths)
    assert sorted(len(batch) for (batch,) in windowed) == [2, 6]
    assert sorted(len(batch) for (batch,) in whole) == [1, 7]
