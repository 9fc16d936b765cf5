"""Infers the schedule of a learning rate from the rates alone, and finds where the rate was raised
above it.
"""

from collections.abc import Iterable

import numpy as np

from trainer.tools.report.result import Anomaly, LearningRate, RaisedRate
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import Floats, bins

JUMP = 1.3
"""Neighbouring points with a ratio above this are a jump: no schedule rises as fast."""
NUM_BEFORE = 5
"""A jump counts only after this many points: a warm-up from 0 first rises by any factor."""
RESTART_SHARE = 0.15
"""A schedule with cycles falls to at most this share of its peak before it starts again."""
MAX_STRETCHES = 8
"""A rate with more jumps follows no schedule."""
HIGH_SHARE = 0.8
"""A rate is high if it is at least this share of the peak."""
TOLERANCE = 0.01
"""A rate is constant if its range is at most this share of the peak."""
MIN_FIT = 0.995
"""A rate follows a schedule if their correlation exceeds this value. It is below 1 because a
console prints few digits.
"""
MAX_STRETCH = 8
"""Because a run may have been stopped early, it is compared with cosines up to this many times as
long.
"""


def raised_rates(series: Series) -> tuple[RaisedRate, ...]:
    """Return all stretches in which the rate is above its schedule, in order.

    Each begins with a jump from one point to the next. A rate that jumps more than `MAX_STRETCHES`
    times follows no schedule, so the result is empty.
    """
    values = series.values
    before = values[:-1]
    after = values[1:]
    found = []
    free = NUM_BEFORE
    for start in (np.flatnonzero((before > 0) & (after > JUMP * before)) + 1).tolist():
        if start < free:
            continue
        level = float(values[start - 1])
        # the stretch ends below the geometric mean of the rates before and after the jump
        below = np.flatnonzero(values[start:] < np.sqrt(level * values[start]))
        stop = start + int(below[0]) if len(below) else len(values)
        falls_back = stop < len(values) and values[stop - 1] > JUMP * values[stop]
        highest = float(values[:start].max())
        is_return = level < 0.12 * highest and 0.7 * highest < values[start] < 1.05 * highest
        is_small = values[start] - level < 0.05 * values.max()
        is_warmup = is_small and _rises_on(values[start:])
        is_restart = level < 0.01 * highest and values[start] < 1.05 * highest
        if is_restart or ((is_return or is_warmup) and not falls_back):
            continue  # the end of a dip, or a restart of the schedule
        stop = stop if falls_back else len(values)
        peak = float(values[start:stop].max())
        found.append(RaisedRate(series[start:stop].ends, level, peak, falls_back))
        if len(found) > MAX_STRETCHES:
            return ()
        free = stop + 1
    return tuple(found)


def _rises_on(values: Floats) -> bool:
    """Return True if the first change of a rate is a rise. Printed rates repeat."""
    changed = np.flatnonzero(values != values[0])
    return bool(len(changed)) and bool(values[changed[0]] > values[0])


def restarted_at(series: Series) -> int | None:
    """Return the last step before a high rate falls below half from one point to the next and then
    warms up to a high rate again; None if there is no such step.

    Schedules with cycles fall to a low rate before they start again. A rate with more than
    `MAX_STRETCHES` such falls follows no schedule.
    """
    values = series.values
    high = values[:-1] > RESTART_SHARE * values.max()
    falls = np.flatnonzero(high & (values[1:] < values[:-1] / 2))
    for fall in falls.tolist() if len(falls) <= MAX_STRETCHES else ():
        after = values[fall + 1 :]
        climb = after[: np.argmax(after) + 1]
        if len(climb) <= NUM_BEFORE:
            continue
        rises = np.diff(climb)
        is_back = climb[-1] > max(values[fall] / 2, 2 * climb[0])
        if is_back and rises.min() >= 0 and rises.max() < climb[-1] / 2:
            return int(series.steps[fall])
    return None


def scheduled(series: Series) -> Series:
    """Return the rates that the schedule set, without the raised stretches."""
    is_usual = np.ones(len(series), dtype=bool)
    for first, last in (stretch.steps for stretch in raised_rates(series)):
        is_usual &= (series.steps < first) | (series.steps > last)
    return series[is_usual]


def learning_rate(series: Series, anomalies: Iterable[Anomaly], total_steps: int) -> LearningRate:
    """Return the schedule, the peak, the warm-up, and the shares of the run and of the anomalies in
    which the rate was high.
    """
    usual = scheduled(series)
    values = usual.values
    peak = float(values.max())
    first_peak = int(np.argmax(values >= peak * (1 - 1e-6)))
    rises = bool(np.all(np.diff(values[: first_peak + 1]) >= 0)) and values[0] < 0.9 * peak
    start = first_peak if rises else 0
    is_high = series.values >= HIGH_SHARE * peak
    peaks = [anomaly.peak_step for anomaly in anomalies]
    near = np.searchsorted(series.steps, peaks, side="right") - 1
    return LearningRate(
        schedule=_schedule(usual[start:], total_steps),
        peak=peak,
        warmup_steps=int(usual.steps[start]) if start else 0,
        last=float(series.values[-1]),
        high_share=float(is_high.mean()),
        anomalies_at_high_share=float(is_high[near.clip(min=0)].mean()) if peaks else None,
        raised=raised_rates(series),
    )


def _schedule(series: Series, total_steps: int) -> str:
    """Return the name of the schedule that fits the rates after the warm-up."""
    peak = float(series.values.max())
    tail = bins(series, 400)
    if peak <= 0 or len(tail) < 3:
        return "unknown"
    y = tail.values / peak
    if np.ptp(y) <= TOLERANCE:
        return "constant"
    x = (tail.steps - tail.steps[0]).astype(np.float64)
    lengths = (total_steps - tail.steps[0], *x[-1] * np.geomspace(1, MAX_STRETCH, 60))
    shapes = [("linear", -x)]
    shapes += [("cosine", np.cos(np.pi * x / max(n, x[-1]))) for n in lengths]
    shapes += [("wsd", -(x - start).clip(0)) for start in x[-1] * np.linspace(0.1, 0.95, 35)]
    fit, name = max((float(np.corrcoef(shape, y)[0, 1]), name) for name, shape in shapes)
    if fit > MIN_FIT:
        return name
    changes = np.diff(series.values)
    is_rare = np.count_nonzero(changes) <= max(1, len(changes) // 10)
    return "step" if is_rare and changes.max() <= 0 else "unknown"
