"""Spreads that outliers do not move: one measure for what the guard sees step by step and for the report (floor 1)."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation, of a normal distribution."""
MIN_CURVE_POINTS = 5
"""Fewer say nothing about the noise of their curve."""


def spread(deviations: ArrayLike, axis: int = -1) -> Any:
    """Standard deviation of `deviations` from a middle, by the median of their sizes; an array over the other axes."""
    return MAD_TO_SIGMA * np.median(np.abs(deviations), axis=axis, overwrite_input=True)


def curve_noise(values: ArrayLike) -> float:
    """Standard deviation of a short curve's noise: of its second differences, which a smooth curve hardly has."""
    bends = np.diff(np.asarray(values, dtype=np.float64), n=2)
    return float(spread(bends)) / 6**0.5 if len(bends) >= MIN_CURVE_POINTS - 2 else 0.0
