"""Curves made small enough to draw without losing what matters, and the axes they stand on.
Nothing here draws.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.report.formatting import number, step
from trainer.report.run_log import Series
from trainer.report.statistics import finite

SMOOTHINGS = (0.6, 0.9)
"""Weights of the exponential mean, as TensorBoard's slider counts them."""
NEGLIGIBLE = 1e-17
NOTHING = Series(np.empty(0, np.int64), np.empty(0))
"""Stands for a metric that was not logged."""


def smooth(series: Series, weight: float) -> Series:
    """Exponential mean of the finite values, corrected for its start.

    Sums over 1, 2, 4, ... values, each from two of the half length, until older ones no longer
    count.
    """
    known = finite(series)
    means, reach = (1 - weight) * known.values, 1
    while reach < len(known) and weight**reach > NEGLIGIBLE:
        means[reach:] += weight**reach * means[:-reach]
        reach *= 2
    return Series(known.steps, means / (1 - weight ** np.arange(1.0, len(known) + 1)))


def decimate(series: Series, num_columns: int) -> Series:
    """At most two points of each of `num_columns` equal parts of the x axis, its lowest and its
    highest, and both ends.

    A million points stay small, and every spike keeps its height. Values are finite.
    """
    if len(series) <= 2 * num_columns:
        return series
    kept = {0, len(series) - 1}
    for first, last in column_bounds(series, num_columns):
        part = series.values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return series[np.array(sorted(kept))]


def column_bounds(series: Series, num_columns: int) -> Iterator[tuple[int, int]]:
    """Index ranges of the columns that are not empty."""
    if not len(series):
        return iter(())
    edges = np.linspace(series.steps[0], series.steps[-1], num_columns + 1)[1:-1]
    bounds = [0, *np.searchsorted(series.steps, edges).tolist(), len(series)]
    return (pair for pair in pairwise(bounds) if pair[0] < pair[1])


def gaps(series: Series, kept: Series) -> NDArray[np.bool_]:
    """For each point of `kept` whether values that are not finite lie before it: there the line
    is interrupted.
    """
    bad_steps = series.steps[~np.isfinite(series.values)]
    return np.diff(np.searchsorted(bad_steps, kept.steps), prepend=0) > 0


NUM_TICKS, MIN_TICKS = 5, 2
MARGIN = 0.04
MAX_SHOWN, MIN_LOG = 1e150, 1e-150
"""Beyond these an axis would overflow."""
NARROW = 1e-9
"""Relative width below which values count as one: labels could not tell them apart."""
SUFFIXES = {1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` become 0 to 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = (
            (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        )
        shown = np.log10(np.clip(values, self.low, None)) if self.is_log else values
        return np.clip((shown - low) / (high - low), 0.0, 1.0)

    def share(self, value: float) -> float:
        return float(self.place(np.array([value], np.float64))[0])

    def ticks(self) -> list[float]:
        """Round values; powers of ten, or these times 2 and 5, where a log axis is long enough
        to hold some.
        """
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1, 2, 5) if math.log10(self.high / self.low) < 2 else (1,)
            powers = range(first, last + 1, max(1, math.ceil((last - first) / NUM_TICKS)))
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) >= MIN_TICKS:
                return ticks
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        places = range(math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9) + 1)
        return [round(place * size, 12) if size > 1e-9 else place * size for place in places]


def scale_of(values: Iterable[float], *, is_log: bool = False, has_margin: bool = True) -> Scale:
    """A scale over finite values; values that are all alike, or none, get room around them."""
    known = [
        min(max(v, -MAX_SHOWN), MAX_SHOWN)
        for v in values
        if math.isfinite(v) and not (is_log and v <= MIN_LOG)
    ]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if high - low <= NARROW * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    if is_log:
        room = (high / low) ** (MARGIN * has_margin)
        return Scale(low / room, high * room, is_log=True)
    room = (high - low) * MARGIN * has_margin
    return Scale(low - room if low < 0 or low > room else 0.0, high + room)


def axis_labels(ticks: Sequence[float], *, is_log: bool) -> list[str]:
    """Short, and different from each other: 0.5, 71.38, 2000, 20k, 1.5M, 1e-5."""
    if is_log:
        sizes = [
            next((size for size in SUFFIXES if size <= tick < 1e3 * size), 1.0) for tick in ticks
        ]
        words = [_word(tick, size) for tick, size in zip(ticks, sizes, strict=True)]
        if len(set(words)) == len(words):
            return words
    spacing = min((b - a for a, b in pairwise(ticks)), default=1.0)
    highest = max(map(abs, ticks), default=0.0)
    if 0 < highest < 1e-3 or highest >= 1e12:
        return [number(tick) for tick in ticks]
    size = next((size for size in SUFFIXES if highest >= 10 * size and spacing >= size / 10), 1.0)
    if size > 1:
        return [_word(tick, size) for tick in ticks]
    num_decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [step(int(tick)) if num_decimals == 0 else f"{tick:.{num_decimals}f}" for tick in ticks]


def _word(value: float, size: float) -> str:
    return f"{value / size:.4g}{SUFFIXES[size]}" if size > 1 and value else number(value)
