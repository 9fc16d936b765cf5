"""Robust statistics over long series. Arrays in, numbers out; nothing here knows a metric."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.detection.window import spread
from trainer.report.run_log import Series

Floats = NDArray[np.float64]
NUM_BINS = 50
MIN_PERIODS = 3
MAX_PLACES = 400
"""Of an onset: a longer stretch is looked at in means of so many parts."""


def logarithm(series: Series) -> Series:
    """What changes by factors; 0 is as small as can be."""
    return Series(series.steps, np.log(np.maximum(series.values, np.finfo(float).tiny)))


def finite(series: Series) -> Series:
    """The points that are numbers."""
    mask = np.isfinite(series.values)
    return series if mask.all() else series[mask]


def within(series: Series, first: float, last: float) -> Series:
    """The points from one step to another."""
    return series[
        np.searchsorted(series.steps, first) : np.searchsorted(series.steps, last, side="right")
    ]


def bins(series: Series, num_bins: int = NUM_BINS) -> Series:
    """Means of `num_bins` stretches of equally many points, at their mean steps; short series
    stay as they are.
    """
    if len(series) <= num_bins:
        return series
    edges = np.linspace(0, len(series), num_bins + 1).astype(np.int64)
    counts = np.diff(edges)
    steps = np.add.reduceat(series.steps, edges[:-1]) // counts
    return Series(steps, np.add.reduceat(series.values, edges[:-1]) / counts)


def epoch_means(series: Series, epochs: Series | None, *, least: int = 3) -> Series:
    """Means over epochs, at the last step of each; bins where `epochs` (step -> epoch so far) has
    fewer than `least`.

    `epochs` counts up from 0 with fractions, as trackers log it; a whole number belongs to the
    epoch that it ends.
    """
    if epochs is None or len(epochs) == 0 or len(series) == 0:
        return bins(series)
    numbers = np.ceil(np.interp(series.steps, epochs.steps, epochs.values) - 1e-9)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1.0))
    if len(firsts) < least:
        return bins(series)
    counts = np.diff(np.append(firsts, len(series)))
    return Series(
        series.steps[firsts + counts - 1], np.add.reduceat(series.values, firsts) / counts
    )


def theil_sen(series: Series) -> float:
    """Median of the slopes between all pairs of points, per step. Quadratic: for bins, not for
    raw series.
    """
    left, right = np.triu_indices(len(series), k=1)
    if len(left) == 0:
        return 0.0
    rises = series.values[right] - series.values[left]
    return float(np.median(rises / (series.steps[right] - series.steps[left])))


def mann_kendall(values: Floats) -> tuple[float, float]:
    """(z, p) of the test for a monotonous trend, corrected for ties. Quadratic; fewer than 4
    points prove nothing.
    """
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
    return Slope(
        per_step,
        mann_kendall(points.values)[1],
        per_step * (last - first),
        float(np.median(points.values)),
    )


def noise(series: Series) -> float:
    """Spread of a series around its own slow course, from differences of neighbours: a standard
    deviation.
    """
    return float(spread(np.diff(series.values))) / math.sqrt(2) if len(series) >= 3 else 0.0


def onset(values: Floats, first: int, last: int, *, is_level: bool = False) -> int:
    """Where in [first, last) values leave their straight course, or their level: the best of
    steps and bends.
    """
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


def period(steps: NDArray[np.int64]) -> int | None:
    """The common distance of steps, if nearly all are that far apart."""
    gaps = np.diff(steps)
    if len(gaps) < MIN_PERIODS:
        return None
    common = int(np.median(gaps))
    return common if common > 1 and float((np.abs(gaps - common) <= 1).mean()) >= 0.8 else None


def rolling_median(values: Floats, width: int, stride: int) -> Floats:
    """Of the `width` points from each `stride`-th point on."""
    return np.asarray(
        np.median(np.lib.stride_tricks.sliding_window_view(values, width)[::stride], axis=1)
    )


def runs(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and stops (exclusive) of all stretches of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return edges[::2], edges[1::2]


def usual_range(
    values: Floats, *, level_window: int, spread_window: int, floor: float, relative_floor: float
) -> tuple[Floats, Floats, Floats]:
    """(z, centre, spread upwards) of each point.

    The centre is the median of the last window of `level_window` points before it, z the distance
    from that in spreads of its side, which are those of what is left in the last `spread_window`
    points.

    A point is held against the past alone, as the guard does: what stays at a new level stands out
    until half of the window has it. The spread is the larger of 1.4826 MAD and the 95 % (5 %)
    quantile over 1.645, which absorbs batches of two kinds; at least `floor` and `relative_floor`
    times the level. Up to 5 % outliers in most windows do not move it.
    """
    windows, before = _windowed(values, level_window)
    centre = np.median(windows, axis=1)[before]
    windows, before = _windowed(values - centre, spread_window)
    ordered = windows - np.median(windows, axis=1)[:, None]
    ordered.sort(axis=1)
    least = np.maximum(spread(ordered), floor)
    if relative_floor:
        levels = np.median(np.abs(_windowed(centre, spread_window)[0]), axis=1)
        least = np.maximum(least, relative_floor * levels)
    last = ordered.shape[1] - 1
    tail = int(0.05 * last)
    # at most twice as heavy as in the run's usual window: a heavier tail is a burst, not the usual
    # spread
    tails = [
        np.minimum(t, 2 * np.median(t))
        for t in (ordered[:, last - tail] / 1.645, -ordered[:, tail] / 1.645)
    ]
    up, down = (np.maximum(least, heavy)[before] for heavy in tails)
    distance = values - centre
    return distance / np.where(distance > 0, up, down), centre, up


def _windowed(values: Floats, width: int) -> tuple[Floats, NDArray[np.int64]]:
    """(overlapping windows, one a row; for each point the last one that lies before it, at the
    start the first).
    """
    width = min(width, len(values) // 2)
    stride = max(1, width // 4)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)[::stride]
    return windows, ((np.arange(len(values)) - width) // stride).clip(0)


NUM_WINDOWS = 20
"""A long series is looked at in windows of a twentieth of it."""
MAX_WINDOWS = 20_000
MIN_COURSE = 8
"""Medians of fewer points show a level, but no course."""
MEDIAN_SPREAD = 1.25
"""Standard deviation of a median of n points, in that of their mean."""


@dataclass(frozen=True)
class Shift:
    """A stretch at another level than the best one before it."""

    steps: tuple[int, int]
    at: int
    """The step before its first,"""
    calm: int
    """and one that is surely before it."""
    before: float
    after: float
    """The level furthest from the one before."""
    least: float
    """What the difference must exceed."""
    is_lasting: bool
    """To the end."""
    delay: int
    """So many points after its first it is certain."""


def level_shift(
    points: Series,
    *,
    sign: int = 1,
    sigma: float,
    width: int = 0,
    ratio: float = 1.0,
    rise: float = 0.0,
    share: float = 0.0,
    least_points: float = 1,
    best_of: tuple[int, int] = (0, 0),
) -> Shift | None:
    """From which step on medians of `width` points lie above (`sign` -1: below) the best one before
    them.

    By more than `sigma` standard deviations of such a median, to more than `ratio` times (less than
    that share of) the level before, by `rise` and by a `share` of the range of all levels, over
    `least_points`; the stretch that lasts to the end, else the longest. `best_of`: the best level
    is that of so many points among so many first ones.
    """
    width = width or max(3, len(points) // NUM_WINDOWS)
    if len(points) < 2 * width:
        return None
    best_width, within = best_of if any(best_of) else (width, len(points))
    stride = max(1, width // 8, len(points) // MAX_WINDOWS)
    first = (len(points) - width) % stride
    values = sign * points.values
    levels, bests = (
        rolling_median(values[first:], width, stride),
        rolling_median(values[:within], best_width, stride),
    )
    starts = first + stride * np.arange(len(levels))
    earlier = (starts - best_width) // stride
    lowest = np.minimum.accumulate(bests)[earlier.clip(0, len(bests) - 1)]
    chance = MEDIAN_SPREAD * noise(points) / math.sqrt(min(width, best_width))
    least = np.maximum(
        max(rise, sigma * chance, share * float(np.ptp(levels))), (ratio - 1) * lowest
    )
    is_known = (earlier >= 0) & ((ratio == 1) | (sign * lowest > 0))  # there is no ratio to 0
    begin, end = _chosen_run(is_known & (levels - lowest > least), least_points / stride)
    if begin == end:
        return None
    stop = int(starts[end - 1]) + width
    if best_width < width:  # so few points need no fit
        at = stride * int(np.flatnonzero(bests <= lowest[begin] + chance)[-1]) + best_width - 1
    else:
        at = _fitted(
            values[:stop], levels[:end], starts, begin, lowest[begin], chance=chance, width=width
        )
    return Shift(
        steps=points[at:stop].ends,
        at=int(points.steps[max(at - 1, 0)]),
        calm=int(points.steps[max(at - width, 0)]),
        before=sign * float(lowest[begin]),
        after=sign * float(levels[begin:end].max()),
        least=float(least[begin]),
        is_lasting=end == len(levels),
        delay=int(starts[begin]) + width - at,
    )


def longest_run(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """(first, last + 1) of the longest stretch of true; (0, 0) without any."""
    begins, ends = runs(mask)
    best = int(np.argmax(ends - begins)) if len(begins) else 0
    return (int(begins[best]), int(ends[best])) if len(begins) else (0, 0)


def _chosen_run(mask: NDArray[np.bool_], least: float) -> tuple[int, int]:
    """Of the stretches of at least so many true the one that lasts to the end, else the
    longest; (0, 0) without any.
    """
    begins, ends = runs(mask)
    is_last = mask[-1] and ends[-1] - begins[-1] >= least
    begin, end = (int(begins[-1]), int(ends[-1])) if is_last else longest_run(mask)
    return (begin, end) if end - begin >= least else (0, 0)


def _fitted(
    values: Floats,
    levels: Floats,
    starts: NDArray[np.int64],
    begin: int,
    lowest: float,
    *,
    chance: float,
    width: int,
) -> int:
    """The onset of a shift that is certain from the window `begin` on: long after it has begun.

    Looked for from a little before the last window at the best level on, until half of the way is
    gone, but no further beyond that first window than it is from there.
    """
    at_best = np.flatnonzero(levels[: begin + 1] <= lowest + chance)
    low, certain = int(starts[at_best[-1] if len(at_best) else begin]), int(starts[begin]) + width
    half = begin + int(np.argmax(levels[begin:] >= (lowest + levels[begin:].max()) / 2))
    is_level = width < MIN_COURSE
    first = max(0, low - (1 if is_level else 2) * width)
    return onset(
        values,
        first,
        min(int(starts[half]) + width, 2 * certain - low, len(values)),
        is_level=is_level,
    )
