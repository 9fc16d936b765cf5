"""Whether rewards or accuracies fell from what they had reached, beyond what noise does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.report.run_log import Series
from trainer.report.statistics import noise, onset

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
    return Collapse((int(points.steps[at]), int(points.steps[-1])), best, last, least)
