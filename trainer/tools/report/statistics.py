"""Robust statistics over long series. Arrays in, numbers out; nothing here knows a metric."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.run_log import Series
from trainer.train.detection.window import spread

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_BINS = 50


def finite(series: Series) -> Series:
    """Return the points that are numbers."""
    mask = np.isfinite(series.values)
    return series if mask.all() else series[mask]


def within(series: Series, first: float, last: float) -> Series:
    """Return the points from one step to another, both included."""
    start = np.searchsorted(series.steps, first)
    return series[start : np.searchsorted(series.steps, last, side="right")]


def bins(series: Series, num_bins: int = NUM_BINS) -> Series:
    """Return the means of `num_bins` stretches of equally many points, at their mean steps.

    A shorter series is returned as it is.
    """
    if len(series) <= num_bins:
        return series
    edges = np.linspace(0, len(series), num_bins + 1).astype(np.int64)
    counts = np.diff(edges)
    steps = np.add.reduceat(series.steps, edges[:-1]) // counts
    return Series(steps, np.add.reduceat(series.values, edges[:-1]) / counts)


def epoch_means(series: Series, epochs: Series | None, *, least: int = 3) -> Series:
    """Return the means over epochs, at the last step of each; bins where there are fewer than
    `least` epochs.

    `epochs` (step -> epoch so far) counts up from 0 with fractions, as trackers log it; a whole
    number belongs to the epoch that it ends.
    """
    if epochs is None or len(epochs) == 0 or len(series) == 0:
        return bins(series)
    numbers = np.ceil(np.interp(series.steps, epochs.steps, epochs.values) - 1e-9)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1.0))
    if len(firsts) < least:
        return bins(series)
    counts = np.diff(np.append(firsts, len(series)))
    means = np.add.reduceat(series.values, firsts) / counts
    return Series(series.steps[firsts + counts - 1], means)


@dataclass(frozen=True)
class Slope:
    """A fitted trend: `change` is slope times span, `level` the median of the bins."""

    per_step: float
    p_value: float
    change: float
    level: float

    @property
    def relative_change(self) -> float:
        return self.change / abs(self.level) if self.level else 0.0

    def is_rising(self, p: float) -> bool:
        return self.p_value < p and self.change > 0

    def is_falling(self, p: float) -> bool:
        return self.p_value < p and self.change < 0


def slope(series: Series) -> Slope:
    """Fit a trend by Theil and Sen and test it by Mann and Kendall, on bins of a long series."""
    points = bins(finite(series))
    left, right = np.triu_indices(len(points), k=1)
    level = float(np.median(points.values)) if len(points) else 0.0
    if len(left) == 0:
        return Slope(0.0, 1.0, 0.0, level)
    rises = points.values[right] - points.values[left]
    per_step = float(np.median(rises / (points.steps[right] - points.steps[left])))
    first, last = points.ends
    score = float(np.sign(rises).sum())
    return Slope(per_step, _mann_kendall(points.values, score), per_step * (last - first), level)


def _mann_kendall(values: Floats, score: float) -> float:
    """Return the p value of a score, corrected for ties. Fewer than 4 points prove nothing."""
    n = len(values)
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if n < 4 or variance <= 0 or score == 0:
        return 1.0
    return math.erfc((abs(score) - 1) / math.sqrt(2 * variance))


def noise(series: Series) -> float:
    """Return the standard deviation of a series around its slow course, from the differences of
    neighbours.
    """
    return float(spread(np.diff(series.values))) / math.sqrt(2) if len(series) >= 3 else 0.0


def rolling(values: Floats, width: int, stride: int) -> Floats:
    """Return the windows of `width` points from each `stride`-th point on, one a row."""
    return np.lib.stride_tricks.sliding_window_view(values, width)[::stride]


def runs(mask: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return starts and stops (exclusive) of all stretches of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return edges[::2], edges[1::2]


def longest_run(mask: NDArray[np.bool_]) -> slice:
    """Return the longest stretch of true; an empty one where there is none."""
    begins, ends = runs(mask)
    if not len(begins):
        return slice(0, 0)
    best = int(np.argmax(ends - begins))
    return slice(int(begins[best]), int(ends[best]))
