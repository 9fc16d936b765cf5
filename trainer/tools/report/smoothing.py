"""Curves smoothed, and thinned without losing a spike."""

from itertools import pairwise

import numpy as np

from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import finite

WEIGHT = 0.9
"""Weight of the exponential mean, as TensorBoard's slider counts it."""
NUM_TERMS = 160
"""Older values together weigh less than 1e-7."""
NUM_COLUMNS = 400
NOTHING = Series(np.empty(0, np.int64), np.empty(0))
"""Stands for a metric that was not logged."""


def smooth(series: Series) -> Series:
    """Return the exponential mean of the finite values, corrected for its start."""
    known = finite(series)
    if not len(known):
        return known
    weights = (1 - WEIGHT) * WEIGHT ** np.arange(min(NUM_TERMS, len(known)))
    sums = np.convolve(known.values, weights)[: len(known)]
    return Series(known.steps, sums / (1 - WEIGHT ** np.arange(1.0, len(known) + 1)))


def thinned(series: Series) -> Series:
    """Keep the lowest and the highest of each of `NUM_COLUMNS` parts of finite values."""
    if len(series) <= 2 * NUM_COLUMNS:
        return series
    edges = np.linspace(0, len(series), NUM_COLUMNS + 1).astype(int)
    kept = set()
    for first, last in pairwise(edges):
        part = series.values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return series[np.array(sorted(kept))]
