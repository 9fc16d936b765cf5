"""Measure the usual level of a signal and its usual spread in a window that outliers cannot spoil
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
"""Fewer points say nothing about the noise of their curve."""


def spread(deviations: ArrayLike, axis: int = -1) -> Any:
    """Return the standard deviation of `deviations` from a middle, by the median of their sizes; an
    array over the other axes.
    """
    return MAD_TO_SIGMA * np.median(np.abs(deviations), axis=axis, overwrite_input=True)


def curve_noise(values: ArrayLike) -> float:
    """Return the standard deviation of a short curve's noise, from its second differences, which a
    smooth curve hardly has.
    """
    bends = np.diff(np.asarray(values, dtype=np.float64), n=2)
    return float(spread(bends)) / 6**0.5 if len(bends) >= MIN_CURVE_POINTS - 2 else 0.0


SIGMAS_TO_Q95 = 1.645
NUM_NEWEST, START_Z = 32, 3.0
"""Values this many spreads above the newest 32 may be the start of a run."""
WINSOR_Z = 6.0
"""Values further out are cut to this: outliers do not hide later ones, yet a lasting shift is
learned.
"""
MIN_SPREAD, MIN_SPREAD_SHARE = 1e-3, 0.05
"""The smallest spread of a signal that is not always positive, in its unit and as a share of its
centre.
"""
MIN_POSITIVE = 1e-12
"""The score of a smaller value is that of this one, so that its logarithm exists."""


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
        return (math.log(max(value, MIN_POSITIVE)) - self.centre) / self.scale


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, by linear interpolation between two of them."""
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


class RobustWindow:
    """The last `size` finite values, winsorised, with their median and spread from `min_points` on.

    While all values are positive their logarithms count, whose spread is at least `min_log_spread`:
    after a quiet stretch small deviations do not stand out.
    """

    def __init__(self, min_log_spread: float, *, size: int = 128, min_points: int = 32) -> None:
        self._min_log_spread, self._min_points = min_log_spread, min_points
        self._values = deque[float](maxlen=size)
        self._usual: Usual | None = None

    @property
    def usual(self) -> Usual | None:
        """Level and spread of the values pushed so far, None while there are too few."""
        if self._usual is None and len(self._values) >= self._min_points:
            self._usual = self._measure()
        return self._usual

    def push(self, value: float) -> None:
        if (usual := self.usual) is not None and (value > 0 or not usual.is_log):
            value = min(value, usual.at(WINSOR_Z))
        self._values.append(value)
        self._usual = None

    def state_dict(self) -> list[float]:
        """Return the values: the rest follows from them."""
        return list(self._values)

    def load_state_dict(self, values: Sequence[float]) -> None:
        self._values = deque(values, self._values.maxlen)
        self._usual = None

    def _measure(self) -> Usual:
        """Measure the window, without the start of a run: its oldest part, where that lies high
        above the newest.

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
        if not high or len(high) <= (high[-1] + 1) / 2:
            return usual
        kept = values[high[-1] + 1 :]
        return self._measured(kept, is_log) if len(kept) >= self._min_points else usual

    def _measured(self, values: Sequence[float], is_log: bool) -> Usual:
        ordered = sorted(values)
        centre = quantile(ordered, 0.5)
        deviations = sorted([abs(value - centre) for value in ordered])
        # a mixture of easy and hard batches has a small median deviation and a long tail
        tail = (quantile(ordered, 0.95) - centre) / SIGMAS_TO_Q95
        floor = self._min_log_spread if is_log else max(MIN_SPREAD, MIN_SPREAD_SHARE * abs(centre))
        return Usual(centre, max(MAD_TO_SIGMA * quantile(deviations, 0.5), tail, floor), is_log)
