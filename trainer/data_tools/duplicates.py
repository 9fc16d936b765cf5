"""Samples with the same token ids, however many there are: found by 8 bytes a sample, then compared token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.samples import Samples

NUM_PLACES = 5


@dataclass(frozen=True)
class Duplicates:
    """Samples that equal an earlier one, or one of training."""

    count: int
    num_samples: int
    places: list[tuple[str, str]]
    """The first: (where it stands, which one it equals)."""

    @property
    def share(self) -> float:
        return self.count / self.num_samples if self.num_samples else 0.0


def inside(samples: Samples, own: np.ndarray) -> Duplicates:
    """`own`: the digests of the samples."""
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    originals = first[inverse]
    later = np.flatnonzero(originals != np.arange(len(own)))
    return _count(samples, later, samples, originals[later])


def between(samples: Samples, own: np.ndarray, others: Samples, known: np.ndarray) -> Duplicates:
    """Those of `samples` that are among `others`; `own`, `known`: the digests of both."""
    order = np.argsort(known, kind="stable")
    found = order[np.searchsorted(known, own, sorter=order).clip(max=len(known) - 1)]
    same = np.flatnonzero(known[found] == own)
    return _count(samples, same, others, found[same])


def _count(samples: Samples, candidates: np.ndarray, others: Samples, originals: np.ndarray) -> Duplicates:
    def pairs() -> Iterator[tuple[int, int]]:
        for sample_id, original in zip(candidates.tolist(), originals.tolist(), strict=True):
            if np.array_equal(samples.sample(sample_id)[0], others.sample(original)[0]):
                yield sample_id, original

    count, places = 0, []
    for count, (sample_id, original) in enumerate(pairs(), start=1):
        if count <= NUM_PLACES:
            places.append((samples.location(sample_id), others.location(original)))
    return Duplicates(count, len(samples), places)
