"""Whether rewards or accuracies fell from what they had reached, beyond what noise does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.report.run_log import Series
from trainer.report.statistics import noise

MIN_POINTS = 6
"""Fewer show no noise to compare a fall with."""
NUM_WINDOWS = 20
"""A long series is looked at in windows of a twentieth, a short one in windows of three points."""
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


def collapse(points: Series, limits: Mapping[str, float]) -> Collapse | None:
    """The running median at the end against the best one before it; None where it is no lower than noise explains."""
    if len(points) < MIN_POINTS:
        return None
    width = max(3, len(points) // NUM_WINDOWS)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(points.values, width), axis=1)
    best, last = float(medians.max()), float(medians[-1])
    by_noise = limits["collapse_sigma"] * MEDIAN_SPREAD * noise(points) / math.sqrt(width)
    least = max(by_noise, limits["collapse_share"] * float(np.ptp(medians)))
    if best - last <= least:
        return None
    onset = int(np.flatnonzero(medians >= best - by_noise / 2)[-1]) + width // 2
    return Collapse((int(points.steps[onset]), int(points.steps[-1])), best, last, least)
