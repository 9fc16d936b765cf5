"""Curves smoothed, and thinned without losing a spike."""

from itertools import pairwise

import numpy as np

from trainer.report.run_log import Series
from trainer.report.statistics import finite

SMOOTHINGS = (0.6, 0.9)
"""Weights of the exponential mean, as TensorBoard's slider counts them."""
NEGLIGIBLE = 1e-17
NUM_COLUMNS = 400
NOTHING = Series(np.empty(0, np.int64), np.empty(0))
"""Stands for a metric that was not logged."""


def smooth(series: Series, weight: float) -> Series:
    """Return the exponential mean of the finite values, corrected for its start.

    Sums over 1, 2, 4, ... values, each from two of the half length, until older ones no longer
    count.
    """
    known = finite(series)
    means, reach = (1 - weight) * known.values, 1
    while reach < len(known) and weight**reach > NEGLIGIBLE:
        means[reach:] += weight**reach * means[:-reach]
        reach *= 2
    return Series(known.steps, means / (1 - weight ** np.arange(1.0, len(known) + 1)))


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
