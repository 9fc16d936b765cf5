"""Finds the shapes that checks look for: a level `beyond` a band, a level that `shift`s, and bursts
(`departures` from the usual level). `beyond` and `shift` also find where the shape begins. For
trends see `statistics.slope`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import (
    Floats,
    Ints,
    Mask,
    is_rising,
    rolling,
    runs,
    within,
)
from trainer.train.detection.window import noise, spread

NUM_WINDOWS = 20
"""A level is the median of a window. By default, this many windows would fit into the series."""
LEAST_WIDTH = 5
MOST_WIDTH = 250
"""The smallest and the largest default width of a window, in points."""
PLACES_PER_WIDTH = 8
"""Windows overlap: this many start within the width of one."""
MAX_WINDOWS = 20_000
MEDIAN_SPREAD = 1.25
"""The ratio of the standard deviations of a median and of a mean of the same points."""
SIGMA = 5
"""Two levels differ if they are more than this many standard deviations of a level apart."""
BAND_SIGMA = 3
"""A level is beyond a band if it is this many standard deviations of a level outside."""
LONG_SHARE = 0.2
"""A result that was better for this share of the points has improved, even if it fell again."""
MIN_SLACK_GAP = 5
"""Regular gaps may differ by one point if they are at least this long."""
ALMOST_ZERO = 1e-12
"""A step or bend that differs from a straight line by less than this share cannot be located."""
TINY = np.finfo(float).tiny


def beyond(
    series: Series,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    width: int = 0,
    of: Callable[..., Floats] = np.median,
) -> Series | None:
    """Return the first stretch of points in which the level of `width` points is beyond a band.

    The stretch begins where the level starts to move towards the limit.
    """
    width = min(width or min(max(LEAST_WIDTH, len(series) // NUM_WINDOWS), MOST_WIDTH), len(series))
    if not width:
        return None
    windows, starts = _windows(series.values, width)
    levels = of(windows, axis=1)
    deviation = spread(windows - np.median(windows, axis=1)[:, None])
    is_whole = width == len(series)
    chance = MEDIAN_SPREAD * deviation / math.sqrt(width)
    excess = np.maximum(low - levels, levels - high)
    begins, ends = runs(excess > (0 if is_whole else BAND_SIGMA * chance))
    if not len(begins):
        return None
    # the first window stands for all values before it
    first = int(starts[begins[0]]) if begins[0] else 0
    stop = int(starts[ends[0] - 1]) + width
    values = series.values[:stop]
    outside = first + np.flatnonzero((values[first:] < low) | (values[first:] > high))
    begin = outside[0]
    if begins[0] and width >= LEAST_WIDTH:
        before = excess[: begins[0]]
        usual = np.flatnonzero(before <= np.median(before) + np.median(chance))
        left = int(starts[usual[-1]]) if len(usual) else 0  # none where values overflow
        courses = [values, np.log(values)] if values.min() > 0 else [values]
        begin = onset(
            *courses,
            first=max(0, left - 2 * width),
            last=first + width,
            is_level=True,
        )
    return series[begin : outside[-1] + 1]


def _windows(values: Floats, width: int) -> tuple[Floats, Ints]:
    """Return overlapping windows as rows, and their starts. The last one ends at the last value."""
    stride = max(1, width // PLACES_PER_WIDTH, len(values) // MAX_WINDOWS)
    first = (len(values) - width) % stride
    windows = rolling(values[first:], width, stride)
    return windows, first + stride * np.arange(len(windows))


@dataclass(frozen=True)
class Move:
    """A stretch whose level is worse than the best level before it."""

    steps: tuple[int, int]
    at: int
    """The last step before the stretch."""
    before: float
    after: float
    """The level in the stretch that is furthest from `before`."""
    is_lasting: bool
    """True if the stretch lasts to the end of the log."""


def shift(
    series: Series,
    *,
    sign: int,
    ratio: float = 1.0,
    share: float = 0.25,
    sigma: float = SIGMA,
    width: int = 0,
) -> Move | None:
    """Find a stretch in which medians of `width` points are above the best earlier median.

    With `sign` -1, find one in which they are below it. The difference must exceed both `sigma`
    standard deviations of such a median and a `share` of the range of all levels.
    If `ratio` is not 1, levels are compared in logarithms and must also differ by that ratio. Of
    several stretches, the one that lasts to the end counts, otherwise the longest.
    """
    width = width or max(4, len(series) // NUM_WINDOWS)
    if len(series) < 2 * width:
        return None
    is_log = ratio != 1
    windows, starts = _windows(series.values, width)
    medians = np.median(windows, axis=1)
    values, levels = (
        sign * (np.log(np.maximum(numbers, TINY)) if is_log else numbers)
        for numbers in (series.values, medians)
    )
    # the best level of the windows that end before a window begins
    earlier = np.searchsorted(starts, starts - width, side="right") - 1
    best = np.minimum.accumulate(levels)[earlier.clip(0)]
    half = len(values) // 2
    noisier = max(noise(values[:half]), noise(values[half:]))
    chance = MEDIAN_SPREAD * noisier / math.sqrt(width)
    least = max(abs(math.log(ratio)), sigma * chance, share * float(np.ptp(levels)))
    begins, ends = runs((earlier >= 0) & (levels - best > least))
    if not len(begins):
        return None
    is_lasting = bool(ends[-1] == len(levels))
    chosen = -1 if is_lasting else int(np.argmax(ends - begins))
    begin = int(begins[chosen])
    end = int(ends[chosen])
    stop = int(starts[end - 1]) + width
    # for slow rises, search from the last window at the usual level until half has risen
    at_usual = np.flatnonzero(levels[:begin] <= best[begin] + chance)
    low = int(starts[at_usual[-1]]) if len(at_usual) else 0
    highest = levels[begin:end].max()
    is_half = levels[begin:end] >= (best[begin] + highest) / 2
    high = int(starts[begin + np.argmax(is_half)])
    # some falls are straight, others are straight in logarithms
    courses = [values] if sign > 0 else [values, series.values]
    at = onset(*courses, first=max(0, low - 2 * width), last=high + width)
    before, after = (sign * float(level) for level in (best[begin], highest))
    return Move(
        steps=series[at:stop].ends,
        at=int(series.steps[max(at - 1, 0)]),
        before=math.exp(before) if is_log else before,
        after=math.exp(after) if is_log else after,
        is_lasting=is_lasting,
    )


def has_risen(series: Series) -> bool:
    """Return whether a series rises, or was higher for `LONG_SHARE` of its points."""
    rise = shift(series, sign=1)
    num_better = len(within(series, *rise.steps)) if rise else 0
    return is_rising(series) or num_better > LONG_SHARE * len(series)


def onset(
    *courses: Floats,
    first: int = 0,
    last: int | None = None,
    is_level: bool = False,
) -> int:
    """Return the index in [first, last) at which values leave their straight course.

    With `is_level`, they leave their constant level. Among all steps and bends, the one with the
    best least-squares fit is chosen. `courses` may describe the same metric in several ways, such as
    its values and their logarithms; the one with the smallest misfit counts.
    """
    _, place = min(_fit(values[first:last], is_level=is_level) for values in courses)
    return first + place


def _fit(points: Floats, *, is_level: bool) -> tuple[float, int]:
    """Return the misfit and the index of the step or bend that fits best. The misfit is the sum of
    the squared residuals, divided by the variance of the noise.

    For each index, the least-squares line (with `is_level`, the mean) gets one more regressor u: a
    step or a ramp that begins there. If P projects onto the line, Q = 1 - P, and r are the
    residuals of the line, then u explains (u . r)^2 / |Q u|^2 of the squared residuals, where
    |Q u|^2 = |u|^2 - |P u|^2. The product of a step with a vector is the sum of the vector's tail.
    A ramp is the sum of all steps from its index on. So one pass of tail sums computes the products
    of all steps, and a second pass those of all ramps.
    """
    size = len(points)
    if size < 6:
        return 0.0, 0
    line, _ = np.linalg.qr(np.vander(np.arange(size), 1 if is_level else 2))
    left = points - line @ (line.T @ points)
    unexplained = (left**2).sum()
    num_after = np.arange(size, 0, -1.0)
    norms = (num_after, num_after * (num_after + 1) * (2 * num_after + 1) / 6)
    gains = []
    for norm in norms:  # of steps that begin at each index, then of bends, which are sums of steps
        left = _tail_sums(left)
        line = _tail_sums(line)
        apart = norm - (line**2).sum(axis=1)
        gains.append(left**2 / np.maximum(apart, ALMOST_ZERO * norm))
    explained = np.maximum(*gains)[2:-1]
    variance = np.square(noise(points)) + TINY
    return float((unexplained - explained.max()) / variance), 2 + int(np.argmax(explained))


def _tail_sums(values: Floats) -> Floats:
    """Return the sum from each index to the end."""
    return np.cumsum(values[::-1], axis=0)[::-1]


def began(series: Series) -> int:
    """Return the step at which a long rise began, which is where the values leave their level."""
    return int(series.steps[onset(series.values, is_level=True)])


LEVEL_POINTS = 32
SPREAD_POINTS = 128
SHORT = 200
"""The usual level of a point is the median of `LEVEL_POINTS` points before it, and its usual spread
is the spread of `SPREAD_POINTS` points before it. In a log with fewer than `SHORT` points, the
level may fall fast.
"""


def departures(values: Floats, floor: float) -> tuple[Floats, Floats, Floats]:
    """Return (z, usual level, usual upward spread) of each point. In a burst, |z| is large.

    A point is compared only with the past, as in the guard. A metric that stays at a new level
    stands out until the new level fills half of the window. The spread is the largest of 1.4826
    MAD, a tail quantile divided by 1.645 (95 % for upward and 5 % for downward departures), and
    `floor`. If batches are of two kinds, the quantile widens the spread, so that the rarer kind does
    not stand out. Up to 5 % outliers in most windows do not change the spread. In a short log, a
    point is also compared with its neighbours, and the quantile is not used.
    """
    windows, before = _windowed(values, min(LEVEL_POINTS, len(values) // 4))
    level = np.median(windows, axis=1)[before]
    if len(values) < SHORT:
        near = np.median(rolling(np.pad(values, 5, mode="edge"), 11, 1), axis=1)
        level = np.minimum(level, near)
    distance = values - level
    windows, before = _windowed(distance, min(SPREAD_POINTS, len(values)))
    ordered = np.sort(windows - np.median(windows, axis=1)[:, None], axis=1)
    least = np.maximum(spread(ordered), floor)
    tail = int(0.05 * (ordered.shape[1] - 1))
    heavy = np.stack([ordered[:, -1 - tail], -ordered[:, tail]]) / 1.645
    # a tail twice as heavy as in the run's usual window is a burst
    heavy = np.minimum(heavy, 2 * np.median(heavy, axis=1)[:, None]) * (len(values) >= SHORT)
    up, down = np.maximum(least, heavy)[:, before]
    return distance / np.where(distance > 0, up, down), level, up


def _windowed(values: Floats, width: int) -> tuple[Floats, Ints]:
    """Return overlapping windows as rows, and for each point the index of the last window that ends
    before it. The first points have no such window and get the first one.
    """
    stride = max(1, width // 4)
    return rolling(values, width, stride), ((np.arange(len(values)) - width) // stride).clip(0)


def period(series: Series, chosen: Mask) -> int | None:
    """Return the usual distance in steps between the chosen points, if nearly all are that far
    apart and not next to each other; else None.
    """
    gaps = np.diff(np.flatnonzero(chosen))
    if len(gaps) < 3:
        return None
    common = int(np.median(gaps))
    slack = 0 if common < MIN_SLACK_GAP else 1
    is_regular = common > 1 and float((np.abs(gaps - common) <= slack).mean()) >= 0.8
    return int(np.median(np.diff(series.steps[chosen]))) if is_regular else None
