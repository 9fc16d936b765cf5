"""The usual level of a signal and its usual spread, from a window that outliers cannot spoil."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation of a Gaussian."""
SIGMAS_TO_Q95 = 1.645
NUM_NEWEST, START_Z = 32, 3.0
"""The start of a run is what lies so many spreads above the newest values."""
WINSOR_Z = 6.0
"""The window takes no value further out: outliers do not hide later ones, yet a lasting shift is learned."""


MIN_SPREAD, MIN_SPREAD_SHARE = 1e-3, 0.05
"""The spread of a signal that is not always positive is at least so much, in its unit and as a share of its centre."""


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


def median_distance(ordered: Sequence[float], centre: float) -> float:
    """Of sorted values, at least two, from a value among them: the nearer half of them stand side by side."""
    size = len(ordered) // 2 + 1
    first, last = 0, len(ordered) - size
    while first < last:
        middle = (first + last) // 2
        if centre - ordered[middle] > ordered[middle + size] - centre:
            first = middle + 1
        else:
            last = middle
    ends = {first, first + 1, first + size - 2, first + size - 1}
    *_, second, farthest = sorted(abs(ordered[index] - centre) for index in ends)
    return farthest if len(ordered) % 2 else quantile((second, farthest), 0.5)


class RunningMedian:
    """Median of the last `size` values, in O(size) moves of memory per value."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def push(self, value: float) -> None:
        if len(self._values) == self.size:
            oldest = self._values.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._values.append(value)
        insort(self._ordered, value)

    @property
    def is_full(self) -> bool:
        return len(self._values) == self.size

    @property
    def median(self) -> float:
        return quantile(self._ordered, 0.5)

    def state(self) -> list[float]:
        return list(self._values)

    def load(self, values: Sequence[float]) -> None:
        self._values = deque(float(value) for value in values)
        self._ordered = sorted(self._values)


class RobustWindow:
    """The last `size` finite values, winsorised, with their median and spread; nothing is said below `min_points`.

    While all values are positive their logarithms count, whose spread is at least `min_log_spread`: a quiet stretch
    does not make trifles stand out.
    """

    def __init__(self, min_log_spread: float, *, size: int = 128, min_points: int = 32) -> None:
        self._min_log_spread = min_log_spread
        self._size = size
        self._min_points = min_points
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self._num_nonpositive = 0
        self._is_log = True
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
        self._num_nonpositive += value <= 0
        oldest = self._values.popleft() if len(self._values) > self._size else None
        self._num_nonpositive -= oldest is not None and oldest <= 0
        self._usual = None
        if self._is_log != (self._num_nonpositive == 0):
            self._is_log = not self._is_log
            self._ordered = sorted(map(self._in_domain, self._values))
            return
        if oldest is not None:
            del self._ordered[bisect_left(self._ordered, self._in_domain(oldest))]
        insort(self._ordered, self._in_domain(value))

    def state(self) -> list[float]:
        """All there is to keep: the rest follows from the values."""
        return list(self._values)

    def load(self, values: Sequence[float]) -> None:
        self._values = deque(float(value) for value in values)
        self._num_nonpositive = sum(value <= 0 for value in self._values)
        self._is_log = self._num_nonpositive == 0
        self._ordered = sorted(map(self._in_domain, self._values))
        self._usual = None

    def _in_domain(self, value: float) -> float:
        return math.log(value) if self._is_log else value

    def _measure(self) -> Usual:
        """Of the window, without its oldest part where that lies high above the newest: the start of a run.

        Were the first steps counted, everything later would look usual. High batches that come now and then are no
        such part: they count.
        """
        usual = self._measured(self._ordered)
        newest = [
            self._in_domain(value) for value in islice(self._values, max(0, len(self._values) - NUM_NEWEST), None)
        ]
        recent = self._measured(sorted(newest))
        if usual.centre + usual.scale < recent.centre + 2 * recent.scale:
            return usual
        bar, values = recent.centre + START_Z * recent.scale, [self._in_domain(value) for value in self._values]
        high = [index for index, value in enumerate(values) if value > bar]
        is_start = bool(high) and len(high) > (high[-1] + 1) / 2
        kept = values[high[-1] + 1 :] if is_start else values
        return self._measured(sorted(kept)) if self._min_points <= len(kept) < len(values) else usual

    def _measured(self, ordered: Sequence[float]) -> Usual:
        centre = quantile(ordered, 0.5)
        spread = MAD_TO_SIGMA * median_distance(ordered, centre)
        # a mixture of easy and hard batches has a small median deviation and a long tail
        spread = max(spread, (quantile(ordered, 0.95) - centre) / SIGMAS_TO_Q95)
        floor = self._min_log_spread if self._is_log else max(MIN_SPREAD, MIN_SPREAD_SHARE * abs(centre))
        return Usual(centre, max(spread, floor), self._is_log)
