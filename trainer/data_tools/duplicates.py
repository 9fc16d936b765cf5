"""Samples with the same token ids, however many there are: found by 8 bytes a sample, then compared token by token."""

from typing import Any

import numpy as np

from trainer.data.samples import Samples

NUM_PLACES = 5


def inside(samples: Samples, own: np.ndarray) -> dict[str, Any]:
    """Samples that equal an earlier one. `own`: the digests of the samples."""
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    originals = first[inverse]
    later = np.flatnonzero(originals != np.arange(len(own)))
    return _found(samples, later, samples, originals[later])


def between(samples: Samples, own: np.ndarray, others: Samples, known: np.ndarray) -> dict[str, Any]:
    """Those of `samples` that are among `others`; `own`, `known`: the digests of both."""
    order = np.argsort(known, kind="stable")
    found = order[np.searchsorted(known, own, sorter=order).clip(max=len(known) - 1)]
    same = np.flatnonzero(known[found] == own)
    return _found(samples, same, others, found[same])


def _found(samples: Samples, candidates: np.ndarray, others: Samples, originals: np.ndarray) -> dict[str, Any]:
    """Their number and share, and the first places: (where one stands, which it equals)."""
    count, places = 0, []
    for sample_id, original in zip(candidates.tolist(), originals.tolist(), strict=True):
        if np.array_equal(samples.sample(sample_id)[0], others.sample(original)[0]):
            count += 1
            if count <= NUM_PLACES:
                places.append((samples.location(sample_id), others.location(original)))
    share = count / len(samples) if len(samples) else 0.0
    return {"count": count, "num_samples": len(samples), "places": places, "share": share}
