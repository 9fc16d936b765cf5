"""Every metric of a log: meaning, numbers, trend, and its course in one sentence."""

from collections import Counter

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import capitalised, listed, number, step
from trainer.tools.report.result import MetricSummary
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import bins, epoch_means, finite, noise, slope
from trainer.tools.report.vocabulary import meaning, role_order

MIN_POINTS = 4
"""Points of a trend."""
MIN_EPOCHS = 8
"""With fewer, a trend is that of 50 bins."""


def phases(run: AnalysedRun, role: str) -> str:
    """Describe how a metric settles: its level and its jitter in each third of the run."""
    parts = np.array_split(run.get(role).values, 3)
    if min(map(len, parts)) < MIN_POINTS:
        return ""
    early, middle, late = (f"{float(np.mean(part)):.3g}" for part in parts)
    first, _, last = (noise(Series(np.arange(len(part)), part)) for part in parts)
    change = "shrinking" if last < 0.8 * first else "growing" if last > 1.25 * first else "even"
    return f"early {early}, middle {middle}, late {late}; jitter {change}"


def inventory(run: AnalysedRun) -> tuple[MetricSummary, ...]:
    """Return all metrics with at least one point; those that findings ask for come first."""
    found = [_summary(run, key, series) for key, series in run.log.series.items() if len(series)]
    return tuple(sorted(found, key=lambda summary: role_order(summary.key)))


def group_counts(metrics: tuple[MetricSummary, ...]) -> str:
    """Return `31: 12 optimisation, 8 reward, ...`."""
    counts = Counter(metric.group for metric in metrics).most_common()
    return f"{len(metrics)}: " + listed(f"{count} {group}" for group, count in counts)


def _summary(run: AnalysedRun, key: str, series: Series) -> MetricSummary:
    entry, points = meaning(key), finite(series)
    trend, moves = _trend(run, points)
    if not len(points):
        points = series[:1]
    low, high = int(np.argmin(points.values)), int(np.argmax(points.values))
    return MetricSummary(
        key=key,
        group=entry.group,
        unit="" if entry.unit == "1" else entry.unit,
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
        trend=trend,
        observation=_observation(run, key, trend, moves),
    )


def _trend(run: AnalysedRun, points: Series) -> tuple[str, str]:
    """Return rising, falling, flat or unclear, and the means of the first and the last third.

    A trend is that of epoch means; a significant one is rising or falling.
    """
    if len(points) < MIN_POINTS:
        return "unclear", ""
    is_by_epoch = run.profile == "controller"
    means = points if is_by_epoch else epoch_means(points, run.find("epoch"))
    fitted = slope(means if len(means) >= MIN_EPOCHS else bins(points))
    if fitted.p_value >= run.limits["trend_p"] or fitted.per_step == 0:
        return "flat", ""
    early, _, late = (number(float(part.mean())) for part in np.array_split(points.values, 3))
    trend = "rising" if fitted.per_step > 0 else "falling"
    return trend, f"from {early} early to {late} late"


def _observation(run: AnalysedRun, key: str, trend: str, moves: str) -> str:
    """Describe the course of a metric: its jumps and its trend, else its range."""
    series = run.log.series[key]
    points = finite(series)
    if not len(points):
        return "Never a number."
    low, high = map(number, np.quantile(points.values, [0.05, 0.95]).tolist())
    wanted = {"up": "rising", "down": "falling"}.get(meaning(key).better)
    if moves:
        verdict = ", as it should" if trend == wanted else ", the wrong way" if wanted else ""
        course = f"{capitalised(trend)} {moves}{verdict}."
    elif low == high:
        course = f"Constant at {low}."
    else:
        course = f"Between {low} and {high} nearly always, without a clear trend."
    jumps = [mover for one in run.anomalies for mover in one.movers if mover.metric == key]
    if jumps:
        peaks = listed(f"{number(one.peak_value)} @ {step(one.peak_step)}" for one in jumps)
        course += f" Jumps to {peaks}."
    num_hidden = len(series) - len(points)
    return course + (f" {num_hidden} points are not numbers." if num_hidden else "")
