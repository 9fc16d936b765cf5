"""Curves made small enough to draw without losing what matters: decimation, smoothing, bins. Nothing here draws."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.report.run_log import Series
from trainer.report.statistics import finite

SMOOTHINGS = (0.6, 0.9)
"""Weights of the exponential mean, as TensorBoard's slider counts them."""
NEGLIGIBLE = 1e-17
NOTHING = Series(np.empty(0, np.int64), np.empty(0))
"""Stands for a metric that was not logged."""


def smooth(series: Series, weight: float) -> Series:
    """Exponential mean of the finite values, corrected for its start.

    Sums over 1, 2, 4, ... values, each from two of the half length, until older ones no longer count.
    """
    known = finite(series)
    means, reach = (1 - weight) * known.values, 1
    while reach < len(known) and weight**reach > NEGLIGIBLE:
        means[reach:] += weight**reach * means[:-reach]
        reach *= 2
    return Series(known.steps, means / (1 - weight ** np.arange(1.0, len(known) + 1)))


def decimate(series: Series, num_columns: int) -> Series:
    """At most two points of each of `num_columns` equal parts of the x axis, its lowest and its highest, and both ends.

    A million points stay small, and every spike keeps its height. Values are finite.
    """
    if len(series) <= 2 * num_columns:
        return series
    kept = {0, len(series) - 1}
    for first, last in column_bounds(series, num_columns):
        part = series.values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    index = np.array(sorted(kept))
    return Series(series.steps[index], series.values[index])


def column_bounds(series: Series, num_columns: int) -> Iterator[tuple[int, int]]:
    """Index ranges of the columns that are not empty."""
    edges = np.linspace(series.steps[0], series.steps[-1], num_columns + 1)[1:-1]
    bounds = [0, *np.searchsorted(series.steps, edges).tolist(), len(series)]
    return (pair for pair in pairwise(bounds) if pair[0] < pair[1])


def bin_means(series: Series, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the finite values between neighbouring `edges`, NaN where there are none."""
    known = finite(series)
    place = np.clip(np.searchsorted(edges, known.steps, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, weights=known.values, minlength=len(edges) - 1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def gaps(series: Series, kept: Series) -> NDArray[np.bool_]:
    """For each point of `kept` whether values that are not finite lie before it: there the line is interrupted."""
    bad_steps = series.steps[~np.isfinite(series.values)]
    return np.diff(np.searchsorted(bad_steps, kept.steps), prepend=0) > 0
