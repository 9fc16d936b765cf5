"""Curves smoothed, and thinned without losing a spike."""

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
    if not known:
        return known
    weights = WEIGHT ** np.arange(min(NUM_TERMS, len(known)))
    means = np.convolve(known.values, weights)[: len(known)] / np.cumsum(
        np.pad(weights, (0, len(known) - len(weights)))
    )
    return Series(known.steps, means)


def thinned(series: Series) -> Series:
    """Keep the lowest and the highest of each of `NUM_COLUMNS` parts of finite values."""
    if len(series) <= 2 * NUM_COLUMNS:
        return series
    parts = np.array_split(np.arange(len(series)), NUM_COLUMNS)
    kept = [part[place(series.values[part])] for part in parts for place in (np.argmin, np.argmax)]
    return series[np.unique(kept)]
