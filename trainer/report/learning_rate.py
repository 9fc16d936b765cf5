"""Which learning rate schedule a run followed, told from the rates alone, and where they left
it.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from trainer.report.result import Anomaly, LearningRate, RaisedRate
from trainer.report.run_log import Series
from trainer.report.statistics import Floats, bins

NUM_BEFORE = 3
"""Points that a schedule has before a jump counts: a warm-up from 0 rises by any factor at
first.
"""


MAX_STRETCHES = 20
"""A rate that jumps more often follows no schedule that it could be lifted off."""


def raised_rates(series: Series, *, jump: float) -> tuple[RaisedRate, ...]:
    """All stretches that begin with a rise by more than `jump` times from one point to the next, in
    order.

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
        found.append(
            RaisedRate(series[start:stop].ends, level, float(values[start:stop].max()), falls_back)
        )
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
    return series[~is_raised(series, stretches)]


TOLERANCE = 0.01
"""A schedule is recognised when no point is further from it than this share of the peak."""
MIN_DIGITS = 8
"""A schedule in fewer different rates goes in steps."""
MAX_STRETCH = 8
"""A run that was stopped early is compared with cosines up to this many times as long."""


def learning_rate(
    series: Series, anomalies: Iterable[Anomaly], *, limits: Mapping[str, float], total_steps: int
) -> LearningRate:
    """Schedule, peak, warm-up, and how much of the run and of its anomalies lies at a high rate.

    High is `lr_high` times the peak. Stretches in which the rate was raised are told apart and are
    no part of the schedule.
    """
    raised = raised_rates(series, jump=limits["lr_jump"])
    usual = scheduled(series, raised)
    values = usual.values
    peak = float(values.max())
    first_peak = int(np.argmax(values >= peak * (1 - 1e-6)))
    is_high = series.values >= limits["lr_high"] * peak
    at = [a.peak_step for a in anomalies]
    near = np.searchsorted(series.steps, at, side="right") - 1
    share = float(is_high[near.clip(min=0)].mean()) if at else None
    warms_up = (
        first_peak > 0
        and bool(np.all(np.diff(values[: first_peak + 1]) >= 0))
        and values[0] < 0.9 * peak
    )
    start = first_peak if warms_up else 0
    return LearningRate(
        schedule=_schedule(usual, start, total_steps),
        peak=peak,
        warmup_steps=int(usual.steps[first_peak]) if warms_up else 0,
        last=float(series.values[-1]),
        high_share=float(is_high.mean()),
        anomalies_at_high_share=share,
        raised=raised,
    )


def _schedule(series: Series, start: int, total_steps: int) -> str:
    peak = float(series.values.max())
    if peak <= 0:
        return "unknown"
    tail = bins(series[start:], 400)
    x = (tail.steps - tail.steps[0]).astype(np.float64)
    y = tail.values / peak
    if len(y) < 3 or x[-1] == 0:
        return "unknown"
    if np.all(np.abs(y - y[0]) <= TOLERANCE):
        return "constant"
    # a console prints few: what lies between two numbers is not told
    digits = np.unique(series.values[start:]) / peak
    tolerance = (
        max(TOLERANCE, 0.75 * float(np.diff(digits).min()))
        if len(digits) >= MIN_DIGITS
        else TOLERANCE
    )
    # the decay may begin a point after the peak: the first step after warm-up has it too
    for first in (0, 1):
        later, rates = x[first:] - x[first], y[first:]
        if _falls_as(-later, rates, tolerance):
            return "linear"
        lengths = (total_steps - tail.steps[first], *later[-1] * np.geomspace(1, MAX_STRETCH, 60))
        if any(
            _falls_as(np.cos(np.pi * later / max(n, later[-1], 1)), rates, tolerance)
            for n in (*lengths, lengths[0] + 1)
        ):
            return "cosine"
    if _is_wsd(x, y):
        return "wsd"
    return "step" if _is_steps(series.values[start:] / peak) else "unknown"


def _falls_as(shape: Floats, y: Floats, tolerance: float) -> bool:
    """Whether rates follow a falling shape down to any floor, over the planned steps or a part
    of them.
    """
    factor, floor = np.polyfit(shape, y, 1)
    return bool(np.abs(floor + factor * shape - y).max() <= tolerance and y[-1] < y[0])


def _is_wsd(x: Floats, y: Floats) -> bool:
    """A plateau at the peak, then a decay that never rises."""
    plateau = np.abs(y - 1) <= TOLERANCE
    length = int(np.argmin(plateau))
    rest = y[length:]
    is_smooth = len(rest) > 2 and bool(np.abs(np.diff(rest)).max() < 0.25)
    return length >= 0.1 * len(y) and is_smooth and bool(np.all(np.diff(rest) <= TOLERANCE))


def _is_steps(y: Floats) -> bool:
    """A few plateaus, each lower than the one before."""
    falls = np.diff(y)
    num_changes = int(np.count_nonzero(np.abs(falls) > 1e-9))
    return 0 < num_changes <= max(1, len(y) // 10) and bool(np.all(falls <= 1e-9))
