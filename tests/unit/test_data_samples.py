"""The order of an epoch over sources, and their samples under common ids."""

from types import SimpleNamespace

import numpy as np
import pytest

from trainer.data.batch_plan import Schedule, Share, held_out_rows
from trainer.data.samples import Samples, SourceSamples
from trainer.errors import DataError
from trainer.runtime.progress import Position


@pytest.mark.parametrize(
    "shares",
    [
        (Share(7, 2.5), Share(4)),
        (Share(10, 0.5), Share(3, 1.5), Share(1, 3.0)),
        (Share(5, 0.3),),
        (Share(6, 1 / 3), Share(8, 1.99)),
    ],
)
def test_rows_come_as_often_as_asked_and_over_epochs_equally_often(shares):
    ends = np.cumsum([share.num_rows for share in shares])
    total = np.zeros(ends[-1], dtype=int)
    for epoch in range(7):
        rows = Schedule(shares, 10**6, seed=1, start=Position(epoch=epoch)).rows(1)
        total += np.bincount(rows, minlength=len(total))
        for share, own in zip(shares, np.split(total, ends[:-1]), strict=True):
            assert own.sum() == share.num_samples * (epoch + 1)
            assert own.max() - own.min() <= 1


def source(name, count, repeat=1.0, **changes):
    """Samples without tokens, which are distinguished by their places."""
    dataset = SimpleNamespace(
        summary=SimpleNamespace(fingerprint=changes.get("fingerprint", name)),
        bounds=changes.get("bounds"),
        location=lambda index: f"{name}{index + 1}",
    )
    return SourceSamples(name, dataset, changes.get("indices", np.arange(count)), repeat)


def test_the_samples_of_a_row_stand_together_and_count_once():
    several = np.array([0, 1, 4, 6])  # rows of one, three and two samples
    first_and_last = source("b", 6, indices=np.array([0, 2]), bounds=several)
    every = source("c", 6, indices=np.arange(3), bounds=several)
    samples = Samples([source("a", 2), first_and_last, every])
    assert [share.num_rows for share in samples.shares] == [2, 2, 3]
    places = " ".join(map(samples.location, range(len(samples))))
    assert places == "a1 a2 b1 b5 b6 c1 c2 c3 c4 c5 c6"
    assert samples.of_rows(np.array([4, 3, 0, 3])).tolist() == [5, 3, 4, 0, 3, 4]
    train, val = every.split(0.3, seed=1)
    assert sorted([*train.samples, *val.samples]) == list(range(6)) and len(val.indices) == 1


def test_the_fingerprint_is_what_it_was_and_covers_sources_and_repeats():
    one = source("a", 5, fingerprint="f" * 64, indices=np.array([0, 2, 4]))
    assert Samples([one]).fingerprint == "f6ef0d199f39e39b", "checkpoints rely on it"
    a = source("a", 3)
    b = source("b", 3)
    variants = [[a], [source("a", 3, 2.0)], [a, b], [b, a], [a, source("b", 3, 1.5)]]
    assert len({Samples(variant).fingerprint for variant in variants}) == len(variants)
    renamed = [source("x", 3, fingerprint="a"), source("y", 3, fingerprint="b")]
    assert Samples(renamed).fingerprint == Samples([a, b]).fingerprint, "names are only names"


def test_a_source_of_no_sample_is_refused():
    why = r"source 'a': repeat=0\.1 of its 4 rows is less than half a sample"
    with pytest.raises(DataError, match=why):
        Samples([source("a", 4, 0.1)])


@pytest.mark.covers("S3.11")
@pytest.mark.parametrize(("count", "ratio", "num_val"), [(100, 0.02, 2), (2, 0.9, 1), (1, 0.5, 0)])
def test_a_split_holds_each_row_once(count, ratio, num_val):
    train, val = source("a", count, 2.0).split(ratio, seed=3)
    assert len(val.indices) == num_val
    assert sorted([*train.indices, *val.indices]) == list(range(count))
    assert (train.repeat, val.repeat) == (2.0, 1.0), "a validation measures every row once"


def test_the_split_is_what_it_was():
    assert held_out_rows(12, 0.25, seed=3).tolist() == [5, 6, 7], "checkpoints rely on it"
