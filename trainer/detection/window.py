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
MIN_POSITIVE = 1e-12
"""Smaller values count as this one, so that their logarithm exists."""


@dataclass(frozen=True)
class Usual:
    """Centre and spread of a window, both in nats of the signal's logarithm."""

    centre: float
    scale: float

    @property
    def level(self) -> float:
        """The centre in the signal's unit."""
        return math.exp(self.centre)

    def at(self, z: float) -> float:
        """Return the value, in the signal's unit, that has score `z`."""
        return math.exp(min(self.centre + z * self.scale, 700.0))

    def z(self, value: float) -> float:
        """Return how many spreads a finite value lies above the centre."""
        return (math.log(max(value, MIN_POSITIVE)) - self.centre) / self.scale


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, by linear interpolation."""
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


class RobustWindow:
    """The last `size` finite values of a positive signal, winsorised, with the median and spread of
    their logarithms from `min_points` on.

    The spread is at least `min_log_spread`: after a quiet stretch small deviations do not stand
    out.
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
        self._values.append(min(value, self.usual.at(WINSOR_Z)) if self.usual else value)
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
        logs = [math.log(max(value, MIN_POSITIVE)) for value in self._values]
        usual, recent = self._measured(logs), self._measured(logs[-NUM_NEWEST:])
        if usual.centre + usual.scale < recent.centre + 2 * recent.scale:
            return usual
        bar = recent.centre + START_Z * recent.scale
        high = [index for index, value in enumerate(logs) if value > bar]
        if not high or len(high) <= (high[-1] + 1) / 2:
            return usual
        kept = logs[high[-1] + 1 :]
        return self._measured(kept) if len(kept) >= self._min_points else usual

    def _measured(self, logs: Sequence[float]) -> Usual:
        ordered = sorted(logs)
        centre = quantile(ordered, 0.5)
        deviations = sorted([abs(value - centre) for value in ordered])
        # a mixture of easy and hard batches has a small median deviation and a long tail
        tail = (quantile(ordered, 0.95) - centre) / SIGMAS_TO_Q95
        spread = max(MAD_TO_SIGMA * quantile(deviations, 0.5), tail, self._min_log_spread)
        return Usual(centre, spread)
