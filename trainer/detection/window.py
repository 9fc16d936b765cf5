"""The usual level of a signal and its usual spread, from a window that outliers cannot spoil
(floor 1).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation, of a normal distribution."""
MIN_CURVE_POINTS = 5
"""Fewer say nothing about the noise of their curve."""


def spread(deviations: ArrayLike, axis: int = -1) -> Any:
    """Standard deviation of `deviations` from a middle, by the median of their sizes; an array
    over the other axes.
    """
    return MAD_TO_SIGMA * np.median(np.abs(deviations), axis=axis, overwrite_input=True)


def curve_noise(values: ArrayLike) -> float:
    """Standard deviation of a short curve's noise: of its second differences, which a smooth
    curve hardly has.
    """
    bends = np.diff(np.asarray(values, dtype=np.float64), n=2)
    return float(spread(bends)) / 6**0.5 if len(bends) >= MIN_CURVE_POINTS - 2 else 0.0


SIGMAS_TO_Q95 = 1.645
NUM_NEWEST, START_Z = 32, 3.0
"""The start of a run is what lies so many spreads above the newest values."""
WINSOR_Z = 6.0
"""The window takes no value further out: outliers do not hide later ones, yet a lasting shift
is learned.
"""
MIN_SPREAD, MIN_SPREAD_SHARE = 1e-3, 0.05
"""The spread of a signal that is not always positive is at least so much, in its unit and as a
share of its centre.
"""


@dataclass(frozen=True)
class Usual:
    """Centre and spread of a window; both in nats if `is_log`, else in the signal's unit."""

    centre: float
    scale: float
    is_log: bool

    @property
    def level(self) -> float:
        """The centre in the signal's unit."""
        return math.exp(self.centre) if self.is_log else self.centre

    def at(self, z: float) -> float:
        """The value, in the signal's unit, that has score `z`."""
        value = self.centre + z * self.scale
        return math.exp(min(value, 700.0)) if self.is_log else value

    def z(self, value: float) -> float:
        """How many spreads a finite value lies above the centre."""
        if not self.is_log:
            return (value - self.centre) / self.scale
        if value > 0:
            return (math.log(value) - self.centre) / self.scale
        return (value / self.level - 1) / self.scale  # no logarithm: its first-order term

    def ratio(self, value: float) -> float | None:
        """Value over level; None where a ratio says nothing."""
        return value / self.level if self.is_log else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between two of them by linear interpolation."""
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


class RobustWindow:
    """The last `size` finite values, winsorised, with their median and spread; nothing is said
    below `min_points`.

    While all values are positive their logarithms count, whose spread is at least `min_log_spread`:
    a quiet stretch does not make trifles stand out.
    """

    def __init__(self, min_log_spread: float, *, size: int = 128, min_points: int = 32) -> None:
        self._min_log_spread, self._min_points = min_log_spread, min_points
        self._values = deque[float](maxlen=size)
        self._usual: Usual | None = None

    @property
    def usual(self) -> Usual | None:
        """Of the values pushed so far, None while there are too few."""
        if self._usual is None and len(self._values) >= self._min_points:
            self._usual = self._measure()
        return self._usual

    def push(self, value: float) -> None:
        if (usual := self.usual) is not None and (value > 0 or not usual.is_log):
            value = min(value, usual.at(WINSOR_Z))
        self._values.append(value)
        self._usual = None

    def state_dict(self) -> list[float]:
        """All there is to keep: the rest follows from the values."""
        return list(self._values)

    def load_state_dict(self, values: Sequence[float]) -> None:
        self._values = deque(values, self._values.maxlen)
        self._usual = None

    def _measure(self) -> Usual:
        """Of the window, without its oldest part where that lies high above the newest: the start
        of a run.

        Were the first steps counted, everything later would look usual. High batches that come now
        and then are no such part: they count.
        """
        is_log = min(self._values) > 0
        values = [math.log(value) for value in self._values] if is_log else list(self._values)
        usual, recent = self._measured(values, is_log), self._measured(values[-NUM_NEWEST:], is_log)
        if usual.centre + usual.scale < recent.centre + 2 * recent.scale:
            return usual
        bar = recent.centre + START_Z * recent.scale
        high = [index for index, value in enumerate(values) if value > bar]
        is_start = bool(high) and len(high) > (high[-1] + 1) / 2
        kept = values[high[-1] + 1 :] if is_start else values
        return (
            self._measured(kept, is_log) if self._min_points <= len(kept) < len(values) else usual
        )

    def _measured(self, values: Sequence[float], is_log: bool) -> Usual:
        ordered = sorted(values)
        centre = quantile(ordered, 0.5)
        spread = MAD_TO_SIGMA * quantile(sorted([abs(value - centre) for value in ordered]), 0.5)
        # a mixture of easy and hard batches has a small median deviation and a long tail
        spread = max(spread, (quantile(ordered, 0.95) - centre) / SIGMAS_TO_Q95)
        floor = self._min_log_spread if is_log else max(MIN_SPREAD, MIN_SPREAD_SHARE * abs(centre))
        return Usual(centre, max(spread, floor), is_log)
