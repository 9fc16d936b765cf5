"""The shapes that checks look for: a level beyond a band, a level that shifts to stay, bursts,
and a lasting trend.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.report.analysed_run import AnalysedRun
from trainer.report.run_log import Series
from trainer.report.statistics import (
    NUM_WINDOWS,
    Floats,
    level_shift,
    logarithm,
    longest_run,
    noise,
    onset,
    runs,
    slope,
)

Ints = NDArray[np.int64]
LEAST_WIDTH = 5
"""Points whose median or mean is a level, of a short log."""
PLACES_PER_WIDTH = 8
"""Windows overlap by all but so large a part of their width."""
CLEAR_SIGMA = 3
"""A fall is at least so many times the noise from epoch to epoch: of many good runs some end
lower by chance.
"""


@dataclass(frozen=True)
class Stretch:
    """Where a level lay beyond a band."""

    steps: tuple[int, int]
    level: float
    is_high: bool


def beyond(
    series: Series,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    width: int = 0,
    of: Callable[..., Floats] = np.median,
) -> Stretch | None:
    """The first stretch in which the level of `width` points, by default a twentieth of all, lies
    beyond a band.

    It sets in at the first point from which on half of a few points lie beyond.
    """
    width = min(width or max(LEAST_WIDTH, len(series) // NUM_WINDOWS), len(series))
    if not width:
        return None
    stride = max(1, width // PLACES_PER_WIDTH)
    offset = (len(series) - width) % stride  # the last window ends with the series
    levels = of(
        np.lib.stride_tricks.sliding_window_view(series.values[offset:], width)[::stride], axis=1
    )
    begins, ends = runs((levels < low) | (levels > high))
    if not len(begins):
        return None
    first = offset + int(begins[0]) * stride if begins[0] else 0
    stop = offset + (int(ends[0]) - 1) * stride + width
    is_high = bool(levels[begins[0]] > high)
    values = series.values[first:stop]
    is_beyond = values > high if is_high else values < low
    few = max(LEAST_WIDTH, width // PLACES_PER_WIDTH)
    # of each point and the next ones, how many lie beyond
    counts = np.convolve(is_beyond, np.ones(few), "full")[few - 1 :]
    onset = int(np.argmax(is_beyond & (counts > few / 2)))  # 0 where there is none
    part = series[first + onset : stop]
    return Stretch(part.ends, float(of(part.values, axis=0)), is_high)


def bursts(series: Series, *, low: float = -math.inf, high: float = math.inf) -> Series:
    """The single points beyond a band."""
    return series[(series.values < low) | (series.values > high)]


def in_a_row(series: Series, mask: NDArray[np.bool_]) -> Series:
    """The longest stretch of points that the mask names."""
    return series[slice(*longest_run(mask))]


@dataclass(frozen=True)
class Move:
    """A level that is another one to the end."""

    metric: str
    at: int
    """The step before its first."""
    onset: int
    last: int
    before: float
    after: float
    least: float
    """What the difference must exceed; of logarithms where it is to change by a ratio."""

    @property
    def size(self) -> float:
        return abs(self.before - self.after)

    @property
    def times(self) -> float:
        return self.after / self.before

    @property
    def steps(self) -> tuple[int, int]:
        return self.at, self.last


def shift(
    run: AnalysedRun,
    role: str,
    *,
    sign: int,
    ratio: float = 1.0,
    width: int = 0,
    series: Series | None = None,
) -> Move | None:
    """A level that goes up or down to stay, by more than noise and by a share of all there was.

    One that is to change by more than a `ratio` is looked at in logarithms. `series` are the points
    to look at.
    """
    series = run.get(role) if series is None else series
    limits, is_log = run.limits, ratio != 1
    found = level_shift(
        logarithm(series) if is_log else series,
        sign=sign,
        sigma=limits["collapse_sigma"],
        share=limits["collapse_share"],
        rise=abs(math.log(ratio)),
        width=width,
    )
    if found is None or not found.is_lasting:
        return None
    before, after = (math.exp(level) if is_log else level for level in (found.before, found.after))
    return Move(
        run.name(role), found.at, found.steps[0], found.steps[1], before, after, found.least
    )


@dataclass(frozen=True)
class WrongWay:
    steps: tuple[int, int]
    """From the best epoch on."""
    change: float
    best: int


def trend(run: AnalysedRun, role: str, *, good: int) -> WrongWay | None:
    """More epochs in a row than the limit in which a role went away from `good` (+1 up) by more
    than noise explains.
    """
    means, needed = run.epochs(role), int(run.limits["rising_epochs"]) + 1
    last = means[-needed:]
    course = slope(last)
    is_clear = (
        -good * course.change > CLEAR_SIGMA * noise(means)
        and course.p_value < run.limits["rising_p"]
    )
    if len(last) < needed or not is_clear:
        return None
    best = int(means.steps[int(np.argmax(good * means.values))])
    return WrongWay((best, last.ends[1]), course.change, best)


def began(series: Series) -> int:
    """The step at which a rise over much of a run set in: where its level ends."""
    return int(series.steps[onset(series.values, 0, len(series), is_level=True)])
