"""The plan: every sample exactly once, within the limits, and evenly distributed. Properties are
tested over random batches.
"""

import itertools

import numpy as np
import pytest

from trainer.config import ConfigError
from trainer.data.batch_plan import (
    START,
    Limits,
    RankPlan,
    Schedule,
    Share,
    permuted,
    rows_at,
)

NUM_CASES = 100


def random_case(seed):
    """Lengths with short and long tails; tight and absent limits, few and many ranks."""
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 80))
    lengths = np.ceil(rng.pareto(1.5, num_samples) * 50 + 1).clip(1, 2000).astype(np.int64)
    if rng.random() < 0.2:
        lengths[:] = lengths[0]
    longest = int(lengths.max())
    max_tokens = [None, longest, longest * 2, longest * 10][rng.integers(4)]
    limits = Limits(max_tokens, [None, 1, 3, 16][rng.integers(4)])
    return lengths, RankPlan(0, int(rng.integers(1, 9)), limits, rng.choice([0.0, 1e-4, 1e-2]))


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_a_batch_is_dealt_whole_within_the_limits_and_evenly(seed):
    lengths, plan = random_case(seed)
    limits = plan.limits
    num_ranks = plan.num_data_ranks
    dealt = plan.deal(lengths)
    micro_batches = list(itertools.chain(*dealt))

    every_index = sorted(itertools.chain(*micro_batches))
    assert every_index == list(range(len(lengths)))
    assert len(dealt) == num_ranks
    # collectives need as many micro-batches on every rank
    assert len({len(rank) for rank in dealt}) == 1
    for members in micro_batches:
        assert limits.max_tokens is None or lengths[members].sum() <= limits.max_tokens
        assert limits.max_samples is None or len(members) <= limits.max_samples
    # ranks plan alone and must come to the same plan
    assert plan.deal(lengths) == dealt

    costs = lengths + plan.quadratic_cost * lengths.astype(np.float64) ** 2
    per_rank = [sum(float(costs[members].sum()) for members in rank) for rank in dealt]
    assert max(per_rank) <= np.mean(per_rank) + costs.max() + 1e-6, per_rank

    by_tokens = lengths.sum() / limits.max_tokens if limits.max_tokens else 1
    by_samples = len(lengths) / limits.max_samples if limits.max_samples else 1
    least = max(1, np.ceil(max(by_tokens, by_samples) / num_ranks))
    assert len(dealt[0]) <= 2 * least + 1, "no more micro-batches than twice the least"


def test_a_sample_longer_than_the_limit_is_refused():
    lengths = np.array([3, 9, 4])
    why = r"data\.max_token_len_per_gpu=8 is less than the 9 tokens of a sample\.\nFix: raise it"
    with pytest.raises(ConfigError, match=why):
        RankPlan(0, 2, Limits(8, None), 0.0).deal(lengths)
    RankPlan(0, 2, Limits(9, None), 0.0).deal(lengths)


def test_rows_come_in_the_order_that_earlier_checkpoints_began():
    assert permuted(np.arange(0), 0, 7).tolist() == []
    large = [9168611, 68877121, 56154411, 15819086, 34597115]
    assert permuted(np.arange(5), 10**8, 3).tolist() == large
    _, rows = rows_at(np.arange(8), (Share(8),), seed=1, epoch=0)
    assert rows.tolist() == [1, 7, 4, 2, 3, 0, 5, 6]


def test_each_seed_and_epoch_has_an_order_and_the_batch_size_only_cuts_it():
    batches = [(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)]
    orders = [Schedule((Share(50),), 50, seed).rows(epoch + 1).tolist() for seed, epoch in batches]
    assert len(set(map(tuple, orders))) == 6
    small = [Schedule((Share(50),), 7, seed=1).rows(step) for step in range(1, 9)]
    assert np.concatenate(small).tolist() == orders[0]


@pytest.mark.parametrize("num_samples", [1, 7, 8, 24])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 30])
def test_a_schedule_continued_anywhere_goes_on_as_it_would_have(num_samples, batch_size):
    shares = (Share(num_samples),)
    whole = Schedule(shares, batch_size, seed=2)
    total_steps = whole.steps_until(3)
    assert total_steps == 3 * whole.steps_per_epoch
    epoch = [whole.rows(step) for step in range(1, whole.steps_per_epoch + 1)]
    assert {len(batch) for batch in epoch[:-1]} <= {batch_size}
    assert sorted(np.concatenate(epoch)) == list(range(num_samples))
    for step in range(total_steps):
        again = Schedule(shares, batch_size, seed=2, start=whole.position(step))
        assert again.steps_until(3) == total_steps
        for later in {step, total_steps - 1}:
            assert again.position(later) == whole.position(later)
            assert np.array_equal(again.rows(later + 1), whole.rows(later + 1))


def test_a_long_sample_costs_what_its_sliding_window_leaves():
    """300 tokens with a window of 100 cost as much as five samples of 100 tokens, not nine."""
    lengths = np.array([300, *[100] * 7])
    windowed = RankPlan(0, 2, Limits(None, None), 0.0, {100: 1.0}).deal(lengths)
    whole = RankPlan(0, 2, Limits(None, None), 1.0).deal(lengths)
    assert sorted(len(batch) for (batch,) in windowed) == [2, 6]
    assert sorted(len(batch) for (batch,) in whole) == [1, 7]


def test_the_first_epoch_goes_from_short_to_long_and_later_ones_are_shuffled():
    lengths = np.random.default_rng(3).integers(1, 6, 30)
    shares = (Share(20), Share(10, repeat=1.5))
    plain = Schedule(shares, 7, 2)
    whole = Schedule(shares, 7, 2, START, "short_first_epoch", lengths)
    shuffled = [plain.rows(step).tolist() for step in range(1, 11)]
    batches = [whole.rows(step).tolist() for step in range(1, 11)]
    first = list(itertools.chain(*batches[:5]))
    assert lengths[first].tolist() == sorted(lengths[first])
    assert sorted(first) == sorted(itertools.chain(*shuffled[:5]))
    assert batches[5:] == shuffled[5:]
    resumed = Schedule(shares, 7, 2, whole.position(3), "short_first_epoch", lengths)
    assert resumed.rows(4).tolist() == batches[3]
