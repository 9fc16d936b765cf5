"""Stretches in which the learning rate lies above its own schedule: a jump up, and mostly a jump back."""

import numpy as np
from numpy.typing import NDArray

from trainer.report.result import RaisedRate
from trainer.report.run_log import Series

NUM_BEFORE = 3
"""Points that a schedule has before a jump counts: a warm-up from 0 rises by any factor at first."""


MAX_STRETCHES = 20
"""A rate that jumps more often follows no schedule that it could be lifted off."""


def raised_rates(series: Series, *, jump: float) -> tuple[RaisedRate, ...]:
    """All stretches that begin with a rise by more than `jump` times from one point to the next, in order.

    None for a rate that does so all the time.
    """
    values = series.values
    before, after = values[:-1], values[1:]
    found, free = [], NUM_BEFORE
    for start in (np.flatnonzero((before > 0) & (after > jump * before)) + 1).tolist():
        if start < free:
            continue
        level = float(values[start - 1])
        below = np.flatnonzero(values[start:] < np.sqrt(level * values[start]))
        stop = start + int(below[0]) if len(below) else len(values)
        falls_back = stop < len(values) and values[stop - 1] > jump * values[stop]
        if not falls_back and values[start] <= jump * values[:start].max():
            continue  # the end of a dip, or a restart of cosines: a return to what was
        if not falls_back:
            stop = len(values)
        steps = (int(series.steps[start]), int(series.steps[stop - 1]))
        found.append(RaisedRate(steps, level, float(values[start:stop].max()), falls_back))
        if len(found) > MAX_STRETCHES:
            return ()
        free = stop + 1
    return tuple(found)


def is_raised(series: Series, stretches: tuple[RaisedRate, ...]) -> NDArray[np.bool_]:
    """Which points of a series lie in one of the stretches."""
    mask = np.zeros(len(series), dtype=bool)
    for stretch in stretches:
        mask |= (series.steps >= stretch.steps[0]) & (series.steps <= stretch.steps[1])
    return mask


def scheduled(series: Series, stretches: tuple[RaisedRate, ...]) -> Series:
    """The rates without the stretches: what the schedule alone did."""
    kept = ~is_raised(series, stretches)
    return Series(series.steps[kept], series.values[kept])
