"""Robust estimates: the centre and scale of a trailing window, and the noise of a curve.

Outliers barely affect them.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAD_TO_SIGMA = 1.4826
"""Converts the median absolute deviation of a normal distribution to its standard deviation."""
SIGMAS_TO_Q95 = 1.645
"""The 95th percentile of a normal distribution, in standard deviations."""
MIN_CURVE_POINTS = 5
"""The noise of a curve cannot be estimated from fewer points."""
SIZE = 128
MIN_POINTS = 32
"""Number of values in a full window, and in the smallest window that can be measured."""
NUM_NEWEST = 32
START_Z = 3.0
"""Values more than 3 scales above the newest 32 values may belong to the start of a run."""
WINSOR_Z = 6.0
"""Values with a higher score are reduced to this score. An outlier then does not hide later
outliers, and the window still adapts to a lasting shift.
"""
MIN_POSITIVE = 1e-12
"""Smaller values are raised to this value, so that their logarithm exists."""
MAX_EXPONENT = 700.0
"""`exp` overflows slightly above this exponent."""


def spread(deviations: ArrayLike) -> Any:
    """Estimate a standard deviation from `deviations` from a centre, by the median of their sizes.

    The median is taken over the last axis; the result has all other axes.
    """
    return MAD_TO_SIGMA * np.median(np.abs(deviations), axis=-1, overwrite_input=True)


def noise(values: ArrayLike) -> float:
    """Return the standard deviation of a curve's noise; 0 for fewer than three values.

    It is estimated from the second differences, which are close to zero for a smooth curve. For
    independent noise e of variance s^2, e[i] - 2 e[i+1] + e[i+2] has the variance (1 + 4 + 1) s^2.
    """
    bends = np.diff(np.asarray(values, dtype=np.float64), n=2)
    return float(spread(bends)) / 6**0.5 if len(bends) else 0.0


def curve_noise(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the noise of a short curve; 0 for fewer than `MIN_CURVE_POINTS` values."""
    return noise(values) if len(values) >= MIN_CURVE_POINTS else 0.0


def _log(value: float) -> float:
    return math.log(max(value, MIN_POSITIVE))


@dataclass(frozen=True, slots=True)
class Usual:
    """Centre and scale of the natural logarithms of a window's values.

    By default both are unknown, and no value counts as high.
    """

    centre: float = math.inf
    scale: float = 1.0

    @property
    def is_known(self) -> bool:
        return self.centre < math.inf

    @property
    def level(self) -> float:
        """The centre of the window, in the signal's unit."""
        return self.at(0)

    def at(self, z: float) -> float:
        """Return the value, in the signal's unit, that has score `z`."""
        exponent = min(self.centre + z * self.scale, MAX_EXPONENT)
        return math.exp(exponent) if self.is_known else math.inf

    def z(self, value: float) -> float:
        """Return the distance of a finite value above the centre, in scales; 0 if it is unknown."""
        return (_log(value) - self.centre) / self.scale if self.is_known else 0.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, by linear interpolation.

    For so few values, numpy takes ten times as long.
    """
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


def _measured(ordered: Sequence[float], least_scale: float) -> Usual:
    """Return the centre and scale of sorted logarithms."""
    centre = _quantile(ordered, 0.5)
    deviations = sorted([abs(value - centre) for value in ordered])
    # a mixture of easy and hard batches has a small median deviation and a long tail
    tail = (_quantile(ordered, 0.95) - centre) / SIGMAS_TO_Q95
    return Usual(centre, max(MAD_TO_SIGMA * _quantile(deviations, 0.5), tail, least_scale))


class RobustWindow:
    """The last `SIZE` finite values of a positive signal, with their `usual` centre and scale.

    The scale is at least `least_scale`, so small deviations after a quiet stretch do not stand out.
    """

    def __init__(self, least_scale: float) -> None:
        self._least_scale = least_scale
        self.usual = Usual()
        self.load_state_dict(())

    def push(self, value: float) -> None:
        self._append(min(value, self.usual.at(WINSOR_Z)))
        self.usual = self._measure()

    def state_dict(self) -> list[float]:
        """Return the values; everything else follows from them."""
        return list(self._values)

    def load_state_dict(self, values: Sequence[float]) -> None:
        self._values = deque[float]()
        self._logs = deque[float]()
        self._ordered: list[float] = []
        for value in values:
            self._append(value)
        self.usual = self._measure()

    def _append(self, value: float) -> None:
        if len(self._values) == SIZE:
            self._values.popleft()
            del self._ordered[bisect_left(self._ordered, self._logs.popleft())]
        self._values.append(value)
        self._logs.append(_log(value))
        insort(self._ordered, self._logs[-1])

    def _measure(self) -> Usual:
        """Measure the window, without its oldest values if they are far above the newest values.

        Such values are the start of a run. If they counted, all later values would look usual.
        Occasional high batches do count.
        """
        if len(self._values) < MIN_POINTS:
            return Usual()
        logs = list(self._logs)
        usual = _measured(self._ordered, self._least_scale)
        newest = _measured(sorted(logs[-NUM_NEWEST:]), self._least_scale)
        if usual.centre + usual.scale < newest.centre + 2 * newest.scale:
            return usual
        # The values up to the last one above the bar are the start of a run if most of them are
        # above it, and if enough values follow.
        bar = newest.centre + START_Z * newest.scale
        high = [index for index, value in enumerate(logs) if value > bar]
        start = high[-1] + 1 if high else 0
        is_start = len(high) > start / 2 and len(logs) - start >= MIN_POINTS
        return _measured(sorted(logs[start:]), self._least_scale) if is_start else usual
