"""The order of an epoch over sources, and their samples under common ids."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.data.announce import source_facts
from trainer.data.batch_plan import Schedule
from trainer.data.order import Share, held_out_rows
from trainer.data.samples import Samples, SourceSamples
from trainer.errors import DataError
from trainer.progress import Position

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
    summary = SimpleNamespace(fingerprint=changes.get("fingerprint", name), end_token_ids={7})
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


def test_a_source_of_no_sample_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"source 'a': repeat 0\.1 of 4 rows is less than half a sample"
    ):
        Samples([source("a", 4, 0.1)])


@pytest.mark.covers("S3.11")
@pytest.mark.parametrize(("count", "ratio", "num_val"), [(100, 0.02, 2), (2, 0.9, 1), (1, 0.5, 0)])
def test_a_split_holds_each_row_once(count: int, ratio: float, num_val: int) -> None:
    train, val = source("a", count, 2.0).split(ratio, seed=3, limit=None)
    assert len(val.indices) == num_val
    assert sorted([*train.indices, *val.indices]) == list(range(count))
    assert (train.repeat, val.repeat) == (2.0, 1.0), "a validation measures every row once"
    limited = source("a", count).split(ratio, seed=3, limit=1)[1]
    assert np.array_equal(limited.indices, val.indices[:1])


def test_the_split_depends_on_the_seed_alone() -> None:
    assert held_out_rows(12, 0.25, seed=3).tolist() == HELD_OUT, "checkpoints rely on it"
    assert held_out_rows(100, 0.25, seed=1).tolist() != held_out_rows(100, 0.25, seed=2).tolist()
