"""Robust statistics of long series. No function here depends on the metric."""

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.run_log import Series

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
NUM_BINS = 50
MIN_TREND_POINTS = 4
"""Fewer points cannot prove a trend."""
SMOOTHING = 0.9
"""Weight of the past in the exponential mean; TensorBoard's smoothing slider has the same scale."""
TREND_P = 0.05
"""A trend is significant if its p-value is below this."""


def finite(series: Series) -> Series:
    """Return the points whose values are finite."""
    return series[np.isfinite(series.values)]


def within(series: Series, first: float, last: float) -> Series:
    """Return the points from step `first` to step `last`, inclusive."""
    return series[(series.steps >= first) & (series.steps <= last)]


def bins(series: Series, num_bins: int = NUM_BINS) -> Series:
    """Divide a series into `num_bins` bins of nearly equal size; return their mean values at their
    mean steps.

    A series without more points than bins is returned unchanged.
    """
    if len(series) <= num_bins:
        return series
    steps, values = (
        np.array([part.mean() for part in np.array_split(column, num_bins)])
        for column in (series.steps, series.values)
    )
    return Series(steps.astype(np.int64), values)


def epoch_means(series: Series, epochs: Series) -> Series:
    """Return the mean over each epoch, at the epoch's last step.

    `epochs` maps a step to the number of completed epochs, with fractions, as trackers log it. A
    step with a whole number is the last of its epoch.
    """
    numbers = np.ceil(np.interp(series.steps, epochs.steps, epochs.values) - 1e-9)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1.0))
    counts = np.diff(firsts, append=len(series))
    means = np.add.reduceat(series.values, firsts) / counts
    return Series(series.steps[firsts + counts - 1], means)


class Slope(NamedTuple):
    """A fitted trend. `change` is the slope times the range of steps; `level` is the median of the
    bins.
    """

    p_value: float
    change: float
    level: float

    @property
    def relative_change(self) -> float:
        return self.change / abs(self.level) if self.level else 0.0

    @property
    def sign(self) -> int:
        """1 for a significant rise, -1 for a significant fall, 0 for neither."""
        return int(np.sign(self.change)) if self.p_value < TREND_P else 0


def slope(series: Series) -> Slope:
    """Fit a trend with the Theil-Sen estimator and test it with the Mann-Kendall test.

    The slope is the median of the slopes between all pairs of points. The score for the test is the
    number of pairs that rise minus the number of pairs that fall. Outliers barely affect either. A
    long series is binned first.
    """
    points = bins(finite(series))
    if len(points) < 2:
        return Slope(1.0, 0.0, points.values.sum())
    left, right = np.triu_indices(len(points), k=1)
    rises = points.values[right] - points.values[left]
    rates = rises / (points.steps[right] - points.steps[left])
    change = float(np.median(rates) * np.ptp(points.steps))
    p_value = _mann_kendall(points.values, float(np.sign(rises).sum()))
    return Slope(p_value, change, float(np.median(points.values)))


def is_rising(series: Series) -> bool:
    """Return True if a series has a significant upward trend."""
    return slope(series).sign > 0


def is_falling(series: Series) -> bool:
    """Return True if a series has a significant downward trend."""
    return slope(series).sign < 0


def _mann_kendall(values: Floats, score: float) -> float:
    """Return the two-sided p-value of a Mann-Kendall score, corrected for ties.

    Without a trend, the score is nearly normal with mean 0 and the variance below. Without ties it
    takes only every second integer, so the usual continuity correction subtracts 1 from its size.
    """
    n = len(values)
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if n < MIN_TREND_POINTS or variance <= 0 or score == 0:
        return 1.0
    return math.erfc((abs(score) - 1) / math.sqrt(2 * variance))


def smooth(series: Series) -> Series:
    """Return the bias-corrected exponential mean of the finite values."""
    known = finite(series)
    sums = accumulate(
        known.values.tolist(),
        lambda mean, value: SMOOTHING * mean + (1 - SMOOTHING) * value,
        initial=0.0,
    )
    weights = 1 - SMOOTHING ** np.arange(1, len(known) + 1)
    return Series(known.steps, np.array([*sums][1:]) / weights)


def rolling(values: Floats, width: int, stride: int) -> Floats:
    """Return windows of `width` points as rows; one starts at every `stride`-th point."""
    return np.lib.stride_tricks.sliding_window_view(values, width)[::stride]


def runs(mask: Mask) -> tuple[Ints, Ints]:
    """Return the starts and the stops (exclusive) of all stretches where the mask is true."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]
