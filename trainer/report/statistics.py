"""Robust statistics over long series. Arrays in, numbers out; nothing here knows a metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.detection.window import spread
from trainer.report.run_log import Series

Floats = NDArray[np.float64]
NUM_BINS = 50
MAX_PLACES = 400
"""Of an onset: a longer stretch is looked at in means of so many parts."""


def finite(series: Series) -> Series:
    """The points that are numbers."""
    mask = np.isfinite(series.values)
    return series if mask.all() else series[mask]


def within(series: Series, first: float, last: float) -> Series:
    """The points from one step to another."""
    return series[np.searchsorted(series.steps, first) : np.searchsorted(series.steps, last, side="right")]


def bins(series: Series, num_bins: int = NUM_BINS) -> Series:
    """Means of `num_bins` stretches of equally many points, at their mean steps; short series stay as they are."""
    if len(series) <= num_bins:
        return series
    edges = np.linspace(0, len(series), num_bins + 1).astype(np.int64)
    counts = np.diff(edges)
    steps = np.add.reduceat(series.steps, edges[:-1]) // counts
    return Series(steps, np.add.reduceat(series.values, edges[:-1]) / counts)


def epoch_means(series: Series, epochs: Series | None) -> Series:
    """Means over epochs, at the last step of each; bins where `epochs` (step -> epoch so far) has fewer than three.

    `epochs` counts up from 0 with fractions, as trackers log it; a whole number belongs to the epoch that it ends.
    """
    if epochs is None or len(epochs) == 0 or len(series) == 0:
        return bins(series)
    numbers = np.ceil(np.interp(series.steps, epochs.steps, epochs.values) - 1e-9)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1.0))
    if len(firsts) < 3:
        return bins(series)
    counts = np.diff(np.append(firsts, len(series)))
    return Series(series.steps[firsts + counts - 1], np.add.reduceat(series.values, firsts) / counts)


def theil_sen(series: Series) -> float:
    """Median of the slopes between all pairs of points, per step. Quadratic: for bins, not for raw series."""
    left, right = np.triu_indices(len(series), k=1)
    if len(left) == 0:
        return 0.0
    rises = series.values[right] - series.values[left]
    return float(np.median(rises / (series.steps[right] - series.steps[left])))


def mann_kendall(values: Floats) -> tuple[float, float]:
    """(z, p) of the test for a monotonous trend, corrected for ties. Quadratic; fewer than 4 points prove nothing."""
    n = len(values)
    if n < 4:
        return 0.0, 1.0
    left, right = np.triu_indices(n, k=1)
    score = float(np.sign(values[right] - values[left]).sum())
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0 or score == 0:
        return 0.0, 1.0
    z = (score - math.copysign(1, score)) / math.sqrt(variance)
    return z, math.erfc(abs(z) / math.sqrt(2))


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
    """Theil-Sen and Mann-Kendall of a series, on bins where it is long."""
    points = bins(finite(series))
    if len(points) == 0:
        return Slope(0.0, 1.0, 0.0, 0.0)
    per_step = theil_sen(points)
    first, last = points.ends
    return Slope(per_step, mann_kendall(points.values)[1], per_step * (last - first), float(np.median(points.values)))


def noise(series: Series) -> float:
    """Spread of a series around its own slow course, from differences of neighbours: a standard deviation."""
    return float(spread(np.diff(series.values))) / math.sqrt(2) if len(series) >= 3 else 0.0


def onset(values: Floats, first: int, last: int, *, is_level: bool = False) -> int:
    """Where in [first, last) values leave their straight course, or their level: the best of steps and bends."""
    stride = max(1, (last - first) // MAX_PLACES)
    edges = np.arange(first, last, stride)
    points = np.add.reduceat(values[:last], edges) / np.diff(np.append(edges, last))
    x = np.arange(len(points))
    if len(x) < 6:
        return first
    since = x[:, None] - x[None, 2:-1]
    candidates = np.stack([since >= 0, np.maximum(since + 1, 0)]).astype(np.float64)
    line, _ = np.linalg.qr(np.vander(x, 1 if is_level else 2))
    apart, left = candidates - line @ (line.T @ candidates), points - line @ (line.T @ points)
    gains = (left @ apart) ** 2 / (apart**2).sum(axis=1)
    return int(edges[2 + np.argmax(gains.max(axis=0))])


def rolling_median(values: Floats, width: int, stride: int) -> Floats:
    """Of the `width` points from each `stride`-th point on."""
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(values, width)[::stride], axis=1))


def longest_run(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """(first, last + 1) of the longest stretch of true; (0, 0) without any."""
    starts, stops = runs(mask)
    if len(starts) == 0:
        return 0, 0
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best])


def runs(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and stops (exclusive) of all stretches of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return edges[::2], edges[1::2]


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation, ties in order of appearance: for measured numbers. NaN if one side is constant."""
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return math.nan
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


@dataclass(frozen=True)
class UsualRange:
    """At each point a running median, and the spread around it upwards and downwards."""

    centre: Floats
    up: Floats
    down: Floats

    def scale(self, distance: Floats, at: Any = slice(None)) -> Floats:
        """The spread on the side that each distance points to; `at` selects the points it is of."""
        return np.where(distance > 0, self.up[at], self.down[at])

    def z(self, values: Floats) -> Floats:
        """Distance of each point from the running median, in spreads of that side."""
        distance = values - self.centre
        return np.asarray(distance / self.scale(distance))


def usual_range(
    values: Floats, *, level_window: int, spread_window: int, floor: float, relative_floor: float
) -> UsualRange:
    """Median of half-overlapping windows of `level_window` points; the spread of what is left, of `spread_window`.

    The level follows a new level within half its window, so that one does not widen the spread. The spread is the
    larger of 1.4826 MAD and the 95 % (5 %) quantile over 1.645, which absorbs batches of two kinds; at least `floor`
    and `relative_floor` times the level. Up to 5 % outliers in most windows do not move it.
    """
    windows, nearest = _windowed(values, level_window)
    centre = np.median(windows, axis=1)[nearest]
    windows, nearest = _windowed(values - centre, spread_window)
    ordered = np.sort(windows, axis=1)
    least = np.maximum(spread(ordered), floor)
    if relative_floor:
        levels = np.median(np.abs(_windowed(centre, spread_window)[0]), axis=1)
        least = np.maximum(least, relative_floor * levels)
    last = ordered.shape[1] - 1
    tail = int(0.05 * last)
    # at most twice as heavy as in the run's usual window: a heavier tail is a burst, not the usual spread
    tails = [np.minimum(t, 2 * np.median(t)) for t in (ordered[:, last - tail] / 1.645, -ordered[:, tail] / 1.645)]
    up, down = (np.maximum(least, heavy)[nearest] for heavy in tails)
    return UsualRange(centre, up, down)


def _windowed(values: Floats, width: int) -> tuple[Floats, NDArray[np.int64]]:
    """(half-overlapping windows that cover all points, one a row; for each point the window nearest to it)."""
    width = min(width, len(values))
    starts = np.unique(np.append(np.arange(0, len(values) - width + 1, max(1, width // 2)), len(values) - width))
    middles = starts + width / 2
    nearest = np.searchsorted((middles[1:] + middles[:-1]) / 2, np.arange(len(values)))
    return np.lib.stride_tricks.sliding_window_view(values, width)[starts], nearest


NUM_WINDOWS = 20
"""A long series is looked at in windows of a twentieth of it."""
NUM_STRIDES = 32
"""Windows that begin within one width: a median for every point of a million takes hours."""
MEDIAN_SPREAD = 1.25
"""Standard deviation of a median of n points, in that of their mean."""


@dataclass(frozen=True)
class Collapse:
    steps: tuple[int, int]
    """The last one at the old level, and the last of all."""
    before: float
    after: float
    least: float
    """What a fall must exceed."""


def collapse(points: Series, limits: Mapping[str, float], *, least_width: int = 3) -> Collapse | None:
    """The running median at the end against the best one before it; None where it is no lower than noise explains.

    Medians are of at least `least_width` points.
    """
    width = max(least_width, len(points) // NUM_WINDOWS)
    if len(points) < 2 * width:
        return None
    stride = max(1, width // NUM_STRIDES)
    starts = range((len(points) - width) % stride, len(points) - width + 1, stride)
    medians = np.array([np.median(points.values[start : start + width]) for start in starts])
    best, last = float(medians.max()), float(medians[-1])
    by_noise = limits["collapse_sigma"] * MEDIAN_SPREAD * noise(points) / math.sqrt(width)
    least = max(by_noise, limits["collapse_share"] * float(np.ptp(medians)))
    if best - last <= least:
        return None
    peak = int(np.flatnonzero(medians >= best - by_noise / 2)[-1])
    fallen = peak + int(np.argmax(medians[peak:] <= (best + last) / 2))
    at = onset(points.values, max(0, starts[peak] - width), starts[fallen] + width, is_level=True) - 1
    return Collapse(points[at:].ends, best, last, least)
