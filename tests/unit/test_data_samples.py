"""The order of an epoch over sources, and their samples under common ids."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prepared import good_rows, run, write_rows
from toy import ToySamples

from trainer.data.announce import source_facts
from trainer.data.batch_plan import Limits, Schedule
from trainer.data.loader import RankPlan, TrainLoader
from trainer.data.order import Share, held_out_rows
from trainer.data.samples import Samples, SourceSamples
from trainer.errors import DataError
from trainer.progress import Position

ORDERS = [[2, 7, 9, 4, 1, 6, 3, 5, 8, 0], [3, 6, 4, 0, 9, 2, 8, 1, 7, 5]]
"""Of ten rows in the first two epochs of seed 1."""
HELD_OUT = [5, 6, 7]
"""Of twelve rows, a quarter by seed 3."""
MIXES = (
    (Share(7, 2.5), Share(4)),
    (Share(10, 0.5), Share(3, 1.5), Share(1, 3.0)),
    (Share(5, 0.3),),
    (Share(6, 1 / 3), Share(8, 1.99)),
)


def epoch_order(shares: tuple[Share, ...], *, seed: int, epoch: int) -> np.ndarray:
    """Row ids of a whole epoch."""
    return Schedule(shares, 10**6, seed, start=Position(epoch=epoch)).rows(1)


def counts(shares: tuple[Share, ...], epoch: int, seed: int = 1) -> np.ndarray:
    """How often each sample comes in an epoch."""
    return np.bincount(
        epoch_order(shares, seed=seed, epoch=epoch),
        minlength=sum(share.num_rows for share in shares),
    )


@pytest.mark.parametrize("shares", MIXES)
def test_an_epoch_is_the_repeated_rows_in_another_order(shares: tuple[Share, ...]) -> None:
    size = sum(share.num_samples for share in shares)
    for epoch in range(6):
        found, first = counts(shares, epoch), 0
        assert found.sum() == len(epoch_order(shares, seed=1, epoch=epoch)) == size
        for share in shares:
            own = found[first : first + share.num_rows]
            assert own.sum() == share.num_samples
            assert set(own) <= {int(share.repeat), int(share.repeat) + 1}
            first += share.num_rows


def test_an_epoch_is_the_one_that_checkpoints_rely_on() -> None:
    orders = [epoch_order((Share(10),), seed=1, epoch=epoch).tolist() for epoch in (0, 1)]
    assert orders == ORDERS


def test_half_a_sample_counts_whole_and_every_epoch_is_as_long() -> None:
    assert [
        Share(rows, repeat).num_samples for rows, repeat in ((3, 2.5), (1, 0.5), (3, 0.5), (9, 1.0))
    ] == [
        8,
        1,
        2,
        9,
    ]
    schedule = Schedule((Share(3, 2.5), Share(4)), 5, seed=1)
    assert (schedule.num_samples, schedule.steps_per_epoch, schedule.steps_until(2)) == (12, 3, 6)


@pytest.mark.parametrize("shares", MIXES)
def test_over_epochs_no_row_comes_twice_as_often_as_another(shares: tuple[Share, ...]) -> None:
    for num_epochs in range(1, 8):
        found, first = sum(counts(shares, epoch) for epoch in range(num_epochs)), 0
        for share in shares:
            own = found[first : first + share.num_rows]
            assert own.max() - own.min() <= 1
            first += share.num_rows


def test_the_half_of_an_epoch_depends_on_seed_epoch_and_source() -> None:
    halves = (Share(20, 0.5), Share(20, 0.5))
    first, second = counts(halves, 0), counts(halves, 1)
    assert np.array_equal(first + second, np.ones(40)), "the other half comes in the next epoch"
    assert not np.array_equal(first[:20], first[20:]), "sources draw on their own"
    assert not np.array_equal(first, counts(halves, 0, seed=2))
    assert np.array_equal(counts((Share(20, 0.5),), 0), first[:20]), (
        "a source that is added changes no other's draw"
    )


def test_another_batch_size_goes_on_in_the_same_epoch() -> None:
    shares = (Share(7, 2.5), Share(4))
    first = Schedule(shares, 8, seed=2)
    second = Schedule(shares, 5, seed=2, start=first.position(1))
    order = [*first.rows(1), *(index for step in range(2, 5) for index in second.rows(step))]
    assert np.array_equal(order, epoch_order(shares, seed=2, epoch=0)) and len(order) == 22
    assert second.position(4).epoch == 1


def test_totals_by_source_count_what_the_whole_run_trains() -> None:
    samples = Samples([source("a", 20, 1.5), source("b", 16, 2.0)])
    schedule = Schedule(samples.shares, 4, seed=3)
    resumed = Schedule(samples.shares, 4, seed=3, start=schedule.position(2))
    last = schedule.steps_until(3)
    trained = np.bincount(
        np.concatenate([schedule.rows(step) for step in range(1, last + 1)]), minlength=36
    )
    for each in (schedule, resumed):
        facts = source_facts(samples, each, total_steps=last)
        assert facts["data/times_by/a"] == pytest.approx(trained[:20].mean())
        assert facts["data/times_by/b"] == pytest.approx(trained[20:].mean())
    assert (facts["data/rows_by/a"], facts["data/tokens_by/a"]) == (20, 20 * 21 // 2)
    assert facts["data/valid_token_frac_by/a"] == pytest.approx(19 / 21)
    assert (facts["data/repeat_by/a"], facts["data/repeat_by/b"]) == (1.5, 2.0)
    assert not source_facts(Samples([source("a", 20)]), schedule, total_steps=last)


def source(name: str, count: int, repeat: float = 1.0, **changes: Any) -> SourceSamples:
    """Samples without tokens: lengths and ids tell them apart."""
    summary = SimpleNamespace(
        fingerprint=changes.get("fingerprint", name), end_token_ids=changes.get("ends", [7])
    )
    bounds = changes.get("bounds")
    dataset: Any = SimpleNamespace(
        summary=summary,
        rows=np.array(
            [(i + 1, i) for i in range(count)],
            dtype=[("num_tokens", "i4"), ("num_loss_tokens", "i4")],
        ),
        bounds=bounds,
        num_rows=count if bounds is None else len(bounds) - 1,
        sample=lambda index: (np.array([index], dtype=np.int32), np.array([True])),
        location=lambda index: f"{name}.jsonl:{index + 1}",
    )
    return SourceSamples(name, dataset, changes.get("indices", np.arange(count)), repeat)


def test_ids_are_common_to_all_sources_and_lead_back_to_the_row() -> None:
    samples = Samples([source("a", 3), source("b", 4, indices=np.array([1, 3])), source("c", 2)])
    places = [
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
        "b.jsonl:2",
        "b.jsonl:4",
        "c.jsonl:1",
        "c.jsonl:2",
    ]
    assert [samples.location(number) for number in range(7)] == places
    assert samples.source_of(range(7)).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert samples.lengths.tolist() == [1, 2, 3, 2, 4, 1, 2]
    assert int(samples.sample(4)[0][0]) == 3


def test_the_samples_of_a_row_stand_together_and_count_once() -> None:
    several = np.array([0, 1, 4, 4 + 2])  # rows of one, three and two samples
    three = np.arange(3)
    parts = [np.array([0, 2]), three]
    samples = Samples(
        [
            source("a", 2),
            *(source(n, 6, indices=i, bounds=several) for n, i in zip("bc", parts, strict=True)),
        ]
    )
    assert [share.num_rows for share in samples.shares] == [2, 2, 3]
    assert samples.of_rows(np.array([4, 3, 0, 3])).tolist() == [5, 3, 4, 0, 3, 4]
    assert [samples.location(i) for i in (2, 3, 4, 6)] == [
        "b.jsonl:1",
        "b.jsonl:5",
        "b.jsonl:6",
        "c.jsonl:2",
    ]
    assert samples.source_of(samples.of_rows(np.arange(7))).tolist() == [
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
        2,
        2,
        2,
    ]
    assert sorted(samples.of_rows(np.arange(7)).tolist()) == list(range(len(samples.lengths)))
    train, val = source("b", 6, indices=three, bounds=several).split(0.3, seed=1, limit=None)
    assert sorted([*train.samples, *val.samples]) == list(range(6)) and len(val.indices) == 1
    whole = [source("a", 6, indices=three, bounds=bounds) for bounds in (several, None)]
    assert len({part.fingerprint for part in whole}) == 2, (
        "other rows make other batches of the same samples"
    )


def test_the_fingerprint_is_what_it_was_and_covers_sources_and_repeats() -> None:
    one = source("a", 5, fingerprint="f" * 64, indices=np.array([0, 2, 4]))
    assert Samples([one]).fingerprint == "f6ef0d199f39e39b", (
        "of runs that began before there were sources"
    )
    variants = [
        [source("a", 3)],
        [source("a", 3, 2.0)],
        [source("a", 3), source("b", 3)],
        [source("b", 3), source("a", 3)],
        [source("a", 3), source("b", 3, 1.5)],
    ]
    assert len({Samples(variant).fingerprint for variant in variants}) == len(variants)
    renamed = [source("x", 3, fingerprint="a"), source("y", 3, fingerprint="b")]
    assert Samples(renamed).fingerprint == Samples(variants[2]).fingerprint, "names are only names"


def test_generation_stops_at_the_end_tokens_of_all_sources() -> None:
    assert Samples([source("a", 1, ends=[5, 9]), source("b", 1, ends=[2, 9])]).end_token_ids == (
        2,
        5,
        9,
    )


def test_a_source_of_no_sample_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"source 'a': repeat 0\.1 of 4 rows is less than half a sample; raise it"
    ):
        Samples([source("a", 4, 0.1)])


@pytest.mark.covers("S3.11")
@pytest.mark.parametrize(
    ("count", "ratio", "num_val"),
    [(100, 0.02, 2), (100, 0.0, 0), (10, 0.02, 1), (2, 0.9, 1), (1, 0.5, 0)],
)
def test_split(count: int, ratio: float, num_val: int) -> None:
    whole = source("a", count, 2.0)
    train, val = whole.split(ratio, seed=3, limit=None)
    assert len(val.indices) == num_val and len(train.indices) == count - num_val
    indices, val_indices = train.indices, val.indices
    assert sorted([*indices, *val_indices]) == list(range(count))
    assert np.array_equal(indices, np.sort(indices)) and np.array_equal(
        val_indices, np.sort(val_indices)
    )
    assert (train.repeat, val.repeat) == (2.0, 1.0), "a validation measures every row once"
    assert np.array_equal(whole.split(ratio, seed=3, limit=1)[1].indices, val_indices[:1])


def test_the_split_depends_on_the_seed_alone() -> None:
    assert held_out_rows(12, 0.25, seed=3).tolist() == HELD_OUT, "checkpoints rely on it"
    assert held_out_rows(100, 0.25, seed=1).tolist() != held_out_rows(100, 0.25, seed=2).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_rank_builds_its_part_of_mixed_batches_with_their_sources(
    tmp_path: Path, num_workers: int
) -> None:
    """Two ranks together train the order of the epoch, each document under the number of its
    source.
    """
    datasets = [
        run(write_rows(tmp_path / f"{name}.jsonl", *good_rows(count)), cache=tmp_path / "cache")
        for name, count in (("a", 5), ("b", 4))
    ]
    samples = Samples([datasets[0].whole("a"), datasets[1].whole("b", 1.5)])
    schedule = Schedule(samples.shares, 4, seed=1)
    ranks = [
        list(
            TrainLoader(
                samples,
                plan=RankPlan(rank, 2, Limits(None, 2), quadratic_cost=0.0),
                schedule=schedule,
                total_steps=schedule.steps_until(2),
                num_workers=num_workers,
            )
        )
        for rank in range(2)
    ]
    for step, batches in enumerate(zip(*ranks, strict=True), start=1):
        packs = [pack for batch in batches for pack in batch.micro_batches]
        assert sorted(i for pack in packs for i in pack.sample_ids) == sorted(schedule.rows(step))
        for pack in packs:
            assert (
                pack.sources_D.tolist() == [int(i >= 5) for i in pack.sample_ids]
                or not pack.sample_ids
            )
        ids = schedule.rows(step)
        by_source = [
            int(samples.num_loss_tokens[ids[(ids >= 5) == number]].sum())
            for number in (False, True)
        ]
        assert all(
            batch.loss_tokens_by == dict(zip("ab", by_source, strict=True)) for batch in batches
        )
        assert sum(by_source) == batches[0].num_loss_tokens


def test_a_rollback_passes_over_steps_of_a_mixed_epoch_and_leaves_the_others_their_samples() -> (
    None
):
    samples = ToySamples(11, shares=(Share(7, 1.5), Share(4, 0.5)))
    schedule = Schedule(samples.shares, 4, seed=1)
    plan = RankPlan(0, 1, Limits(None, None), quadratic_cost=0.0)
    loader = TrainLoader(samples, plan=plan, schedule=schedule, total_steps=8, num_workers=0)
    whole = {batch.step: batch.sample_ids for batch in loader}
    loader.rewind(schedule.position(1), skipped_steps=frozenset({3, 4}))
    after = {batch.step: batch.sample_ids for batch in loader}
    assert after == {step: ids for step, ids in whole.items() if step in (2, 5, 6, 7, 8)}
