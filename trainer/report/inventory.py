"""Every metric of a log: what it is, its numbers, its slow course, and what this run shows, in
one sentence.
"""

import math
from collections.abc import Mapping

import numpy as np

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import listed, number
from trainer.report.result import MetricSummary, Mover, Trend
from trainer.report.run_log import Series
from trainer.report.statistics import bins, epoch_means, finite, noise, slope
from trainer.report.vocabulary import meaning, role_order

NUM_LAST = 10


def trends(run: AnalysedRun) -> tuple[Trend, ...]:
    """One for each metric with at least four finite points, on epoch means or on 50 bins; in
    the order of roles.
    """
    epochs = run.find("epoch")
    found = []
    for key, series in sorted(run.log.series.items(), key=lambda item: role_order(item[0])):
        points = finite(series)
        if len(points) < 4:
            continue
        means = points if run.profile == "controller" else epoch_means(points, epochs)
        fitted = slope(means if len(means) >= 8 else bins(points))
        early, middle, late = (float(part.mean()) for part in np.array_split(points.values, 3))
        last = tuple(float(value) for value in means.values[-NUM_LAST:])
        found.append(Trend(key, fitted.per_step, fitted.p_value, early, middle, late, last))
    return tuple(found)


def direction(trend: Trend | None, limits: Mapping[str, float]) -> str:
    """rising or falling where that is significant, flat where not; unclear without a trend."""
    if trend is None:
        return "unclear"
    if trend.p_value >= limits["trend_p"] or trend.slope_per_step == 0:
        return "flat"
    return "rising" if trend.slope_per_step > 0 else "falling"


def phases(run: AnalysedRun, role: str) -> str:
    """How a metric settles: its level and its jitter in each third of the run."""
    parts = np.array_split(run.get(role).values, 3)
    if min(len(part) for part in parts) < 4:
        return ""
    levels = [f"{float(np.mean(part)):.3g}" for part in parts]
    jitters = [noise(Series(np.arange(len(part)), part)) for part in parts]
    change = (
        "shrinking"
        if jitters[2] < 0.8 * jitters[0]
        else "growing"
        if jitters[2] > 1.25 * jitters[0]
        else "even"
    )
    return f"early {levels[0]}, middle {levels[1]}, late {levels[2]}; jitter {change}"


GROUPS = ("optimisation", "reward", "length", "state", "timing", "memory", "data", "other")
WANTED = {"rising": "up", "falling": "down"}
"""What a metric with a trend would have to want."""


def inventory(run: AnalysedRun, trends: tuple[Trend, ...]) -> tuple[MetricSummary, ...]:
    """All metrics with at least one point, by group; those that rules look at come first, then
    by name.
    """
    by_key = {trend.key: trend for trend in trends}
    summaries = [
        _summary(run, key, series, by_key.get(key))
        for key, series in run.log.series.items()
        if len(series)
    ]
    return tuple(sorted(summaries, key=lambda s: (GROUPS.index(s.group), role_order(s.key))))


def group_counts(metrics: tuple[MetricSummary, ...]) -> str:
    """`31: 12 optimisation, 8 reward, ...`."""
    counts = {group: sum(m.group == group for m in metrics) for group in GROUPS}
    return f"{len(metrics)}: " + listed(
        f"{count} {group}" for group, count in counts.items() if count
    )


def _summary(run: AnalysedRun, key: str, series: Series, trend: Trend | None) -> MetricSummary:
    entry, known = meaning(key), finite(series)
    points = known if len(known) else Series(series.steps[:1], np.array([math.nan]))
    low, high = int(np.argmin(points.values)), int(np.argmax(points.values))
    course = direction(trend, run.limits)
    return MetricSummary(
        key=key,
        group=entry.group,
        unit=entry.unit,
        meaning=entry.meaning,
        direction=entry.better,
        num_points=len(series),
        first=float(points.values[0]),
        last=float(points.values[-1]),
        minimum=float(points.values[low]),
        minimum_step=int(points.steps[low]),
        maximum=float(points.values[high]),
        maximum_step=int(points.steps[high]),
        median=float(np.median(points.values)),
        trend=course,
        observation=_observation(run, key, points, trend, course)
        if len(known)
        else "Never a number.",
    )


def _observation(
    run: AnalysedRun, key: str, points: Series, trend: Trend | None, course: str
) -> str:
    hidden = len(run.log.series[key]) - len(points)
    lost = f" {hidden} points are not numbers." if hidden else ""
    low, high = map(number, np.quantile(points.values, [0.05, 0.95]).tolist())
    moves = (
        f"from {number(trend.early)} early to {number(trend.late)} late"
        if trend and course in WANTED
        else ""
    )
    if np.ptp(points.values) == 0:
        return f"Constant at {low}.{lost}"
    if movers := [m for a in run.anomalies for m in a.movers if m.metric == key]:
        return (
            _of_bursts(points, movers)
            + (f" Apart from that {course}, {moves}." if moves else "")
            + lost
        )
    if moves:
        good = meaning(key).better
        verdict = (
            ""
            if good not in ("up", "down")
            else ", as it should"
            if good == WANTED[course]
            else ", the wrong way"
        )
        return f"{course.capitalize()} {moves}{verdict}.{lost}"
    return f"Between {low} and {high} nearly always, without a clear trend.{lost}"


def _of_bursts(points: Series, movers: list[Mover]) -> str:
    """Calm level, then where and how far it jumped."""
    first, peaks = movers[0].onset_step, sorted(mover.peak_value for mover in movers)
    is_calm = points.steps < first
    low, high = np.quantile(
        points.values[is_calm] if is_calm.any() else points.values, [0.05, 0.95]
    ).tolist()
    reach = f"{number(peaks[0])} to {number(peaks[-1])}" if len(peaks) > 1 else number(peaks[0])
    return (
        f"{number(low)} to {number(high)} until step {first}; "
        f"{'rises' if movers[0].sign > 0 else 'falls'} to {reach} near "
        f"{listed(str(mover.peak_step) for mover in movers)}."
    )
