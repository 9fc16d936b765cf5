"""Which learning rate schedule a run followed, told from the rates alone, and where they left
it.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.result import Anomaly, LearningRate, RaisedRate
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import Floats, bins

JUMP = 3
"""A rate this many times that of the point before jumps: no schedule rises so."""
NUM_BEFORE = 3
"""Points that a schedule has before a jump counts: a warm-up from 0 rises by any factor at
first.
"""
MAX_STRETCHES = 20
"""A rate that jumps more often follows no schedule that it could be lifted off."""
HIGH_SHARE = 0.8
"""Share of the peak from which on a rate is high."""
TOLERANCE = 0.01
"""A schedule is recognised when no point is further from it than this share of the peak."""
MIN_DIGITS = 8
"""A schedule in fewer different rates goes in steps."""
MAX_STRETCH = 8
"""A run that was stopped early is compared with cosines up to this many times as long."""


def raised_rates(series: Series) -> tuple[RaisedRate, ...]:
    """Return all stretches that begin with a jump from one point to the next, in order.

    None for a rate that does so all the time.
    """
    values = series.values
    before, after = values[:-1], values[1:]
    found, free = [], NUM_BEFORE
    for start in (np.flatnonzero((before > 0) & (after > JUMP * before)) + 1).tolist():
        if start < free:
            continue
        level = float(values[start - 1])
        below = np.flatnonzero(values[start:] < np.sqrt(level * values[start]))
        stop = start + int(below[0]) if len(below) else len(values)
        falls_back = stop < len(values) and values[stop - 1] > JUMP * values[stop]
        if not falls_back and values[start] <= JUMP * values[:start].max():
            continue  # the end of a dip, or a restart of cosines: a return to an earlier rate
        if not falls_back:
            stop = len(values)
        peak = float(values[start:stop].max())
        found.append(RaisedRate(series[start:stop].ends, level, peak, falls_back))
        free = stop + 1
    return tuple(found) if len(found) <= MAX_STRETCHES else ()


def is_raised(series: Series, stretches: Iterable[RaisedRate]) -> NDArray[np.bool_]:
    """Return which points of a series lie in one of the stretches."""
    mask = np.zeros(len(series), dtype=bool)
    for stretch in stretches:
        mask |= (series.steps >= stretch.steps[0]) & (series.steps <= stretch.steps[1])
    return mask


def scheduled(series: Series) -> Series:
    """Return the rates without the raised stretches: what the schedule alone did."""
    return series[~is_raised(series, raised_rates(series))]


def learning_rate(
    series: Series, anomalies: Iterable[Anomaly], *, total_steps: int
) -> LearningRate:
    """Return schedule, peak, warm-up, and how much of the run and of its anomalies lies at a high
    rate.
    """
    usual = scheduled(series)
    values = usual.values
    peak = float(values.max())
    first_peak = int(np.argmax(values >= peak * (1 - 1e-6)))
    rises = bool(np.all(np.diff(values[: first_peak + 1]) >= 0))
    start = first_peak if rises and values[0] < 0.9 * peak else 0
    is_high = series.values >= HIGH_SHARE * peak
    at = [anomaly.peak_step for anomaly in anomalies]
    near = np.searchsorted(series.steps, at, side="right") - 1
    return LearningRate(
        schedule=_schedule(usual, start, total_steps),
        peak=peak,
        warmup_steps=int(usual.steps[start]) if start else 0,
        last=float(series.values[-1]),
        high_share=float(is_high.mean()),
        anomalies_at_high_share=float(is_high[near.clip(min=0)].mean()) if at else None,
        raised=raised_rates(series),
    )


def _schedule(series: Series, start: int, total_steps: int) -> str:
    """Return the name of the schedule that fits the rates after the warm-up."""
    peak = float(series.values.max())
    tail = bins(series[start:], 400)
    if peak <= 0 or len(tail) < 3:
        return "unknown"
    x, y = (tail.steps - tail.steps[0]).astype(np.float64), tail.values / peak
    if np.all(np.abs(y - y[0]) <= TOLERANCE):
        return "constant"
    # a console prints few digits: between two numbers nothing is told
    rates = series.values[start:] / peak
    digits = np.unique(rates)
    gap = 0.75 * float(np.diff(digits).min()) if len(digits) >= MIN_DIGITS else 0.0
    tolerance = max(TOLERANCE, gap)
    # the decay may begin a point after the peak: the first step after warm-up has it too
    for first in (0, 1):
        later, left = x[first:] - x[first], y[first:]
        if _falls_as(-later, left, tolerance):
            return "linear"
        planned = total_steps - int(tail.steps[first])
        lengths = (planned, planned + 1, *later[-1] * np.geomspace(1, MAX_STRETCH, 60))
        cosines = (np.cos(np.pi * later / max(n, later[-1], 1)) for n in lengths)
        if any(_falls_as(cosine, left, tolerance) for cosine in cosines):
            return "cosine"
    if _is_wsd(y):
        return "wsd"
    falls = np.diff(rates)
    num_changes = int(np.count_nonzero(np.abs(falls) > 1e-9))
    is_steps = num_changes <= max(1, len(rates) // 10) and np.all(falls <= 1e-9)
    return "step" if is_steps else "unknown"


def _falls_as(shape: Floats, y: Floats, tolerance: float) -> bool:
    """Return whether rates follow a falling shape down to any floor."""
    factor, floor = np.polyfit(shape, y, 1)
    return bool(np.abs(floor + factor * shape - y).max() <= tolerance and y[-1] < y[0])


def _is_wsd(y: Floats) -> bool:
    """Return whether the rate keeps its peak for a while, then decays and never rises."""
    length = int(np.argmax(y < 1 - TOLERANCE))
    falls = np.diff(y[length:])
    is_smooth = len(falls) > 1 and bool(falls.min() > -0.25 and falls.max() <= TOLERANCE)
    return length >= 0.1 * len(y) and is_smooth
