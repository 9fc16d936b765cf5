"""Every metric of a log: what it is, its numbers, and what this run shows, in one sentence."""

import math

import numpy as np

from trainer.report.analysed_run import AnalysedRun
from trainer.report.raised_rate import scheduled
from trainer.report.result import LearningRate, MetricSummary, Mover, Trend
from trainer.report.run_log import Series
from trainer.report.sentence_parts import listed, number, percent
from trainer.report.statistics import finite
from trainer.report.trends import direction
from trainer.report.vocabulary import meaning, role_order

GROUPS = ("optimisation", "reward", "length", "state", "timing", "memory", "data", "other")
TIED = 0.005
"""A metric within this share of its peak stays there."""


def inventory(run: AnalysedRun, trends: tuple[Trend, ...], rate: LearningRate | None) -> tuple[MetricSummary, ...]:
    """All metrics with at least one point, by group; those that rules look at come first, then by name."""
    by_key = {trend.key: trend for trend in trends}
    summaries = [
        _summary(run, key, series, by_key.get(key), rate) for key, series in run.log.series.items() if len(series)
    ]
    return tuple(sorted(summaries, key=lambda s: (GROUPS.index(s.group), role_order(s.key))))


def _summary(
    run: AnalysedRun, key: str, series: Series, trend: Trend | None, rate: LearningRate | None
) -> MetricSummary:
    entry, points = meaning(key), finite(series)
    if not len(points):
        nothing = math.nan
        return MetricSummary(
            *(key, entry.group, entry.unit, entry.text, entry.direction, len(series), nothing, nothing),
            *(nothing, int(series.steps[0]), nothing, int(series.steps[0]), nothing, "unclear", "Never a number."),
        )
    low, high = int(np.argmin(points.values)), int(np.argmax(points.values))
    course = direction(trend, run.limits)
    is_rate = rate is not None and rate.peak > 0 and key == run.key("lr")
    return MetricSummary(
        key=key,
        group=entry.group,
        unit=entry.unit,
        meaning=entry.text,
        direction=entry.direction,
        num_points=len(series),
        first=float(points.values[0]),
        last=float(points.values[-1]),
        minimum=float(points.values[low]),
        minimum_step=int(points.steps[low]),
        maximum=float(points.values[high]),
        maximum_step=int(points.steps[high]),
        median=float(np.median(points.values)),
        trend=course,
        observation=_of_rate(points, rate) if is_rate and rate else _observation(run, key, points, trend, course),
    )


def _observation(run: AnalysedRun, key: str, points: Series, trend: Trend | None, course: str) -> str:
    hidden = len(run.log.series[key]) - len(points)
    lost = f" {hidden} points are not numbers." if hidden else ""
    if np.ptp(points.values) == 0:
        return f"Constant at {number(float(points.values[0]))}.{lost}"
    if movers := [m for a in run.anomalies for m in a.movers if m.metric == key]:
        return _of_bursts(points, movers) + _apart_from_bursts(trend, course) + lost
    if trend is not None and course in ("rising", "falling"):
        good = {"rising": "up", "falling": "down"}[course]
        wanted = meaning(key).direction
        verdict = ", as it should" if wanted == good else ", the wrong way" if wanted in ("up", "down") else ""
        return f"{course.capitalize()} from {number(trend.early)} early to {number(trend.late)} late{verdict}.{lost}"
    low, high = np.quantile(points.values, [0.05, 0.95])
    return f"Between {number(float(low))} and {number(float(high))} nearly always, without a clear trend.{lost}"


def _of_bursts(points: Series, movers: list[Mover]) -> str:
    """Calm level, then where and how far it jumped."""
    first = movers[0].onset_step
    calm = points.values[points.steps < first]
    calm = calm if len(calm) else points.values
    low, high = np.quantile(calm, [0.05, 0.95])
    peaks = sorted(m.peak_value for m in movers)
    verb = "rises" if movers[0].sign > 0 else "falls"
    reach = number(peaks[0]) if len(peaks) == 1 else f"{number(peaks[0])} to {number(peaks[-1])}"
    return (
        f"{number(float(low))} to {number(float(high))} until step {first}; {verb} to {reach} near "
        f"{listed(str(m.peak_step) for m in movers)}."
    )


def _apart_from_bursts(trend: Trend | None, course: str) -> str:
    if trend is None or course not in ("rising", "falling"):
        return ""
    return f" Apart from that {course}, from {number(trend.early)} early to {number(trend.late)} late."


def _of_rate(points: Series, rate: LearningRate) -> str:
    """Schedule, peak, and how long it stays near the peak."""
    warmup = f"warms up over {rate.warmup_steps} steps, " if rate.warmup_steps else ""
    usual = scheduled(points, rate.raised)
    near = usual.steps[usual.values >= (1 - 10 * TIED) * rate.peak]
    overlap = rate.anomalies_at_high_share
    unstable = f"; {percent(overlap)} of the unstable intervals lie at a high rate" if overlap is not None else ""
    text = (
        f"{rate.schedule} with peak {number(rate.peak)}: {warmup}is within 5 % of the peak until step {near[-1]}, "
        f"ends at {number(rate.last)}{unstable}."
    )
    return text[0].upper() + text[1:]


def group_counts(metrics: tuple[MetricSummary, ...]) -> str:
    """`31 metrics: 12 optimisation, 8 reward, ...`."""
    counts = {group: sum(m.group == group for m in metrics) for group in GROUPS}
    return f"{len(metrics)}: " + listed(f"{count} {group}" for group, count in counts.items() if count)
