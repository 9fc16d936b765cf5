"""Every metric of a log: meaning, range and trend."""

from collections import Counter

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import listed, number
from trainer.tools.report.result import MetricSummary
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import epoch_means, finite, noise
from trainer.tools.report.vocabulary import meaning, role_order

MIN_POINTS = 4
"""Points of a third of a run."""
MIN_EPOCHS = 8
"""With fewer epochs a trend is that of 50 bins."""


def inventory(run: AnalysedRun) -> tuple[MetricSummary, ...]:
    """Return all metrics of a log; those that checks ask for come first."""
    found = [_summary(run, key, series) for key, series in run.log.series.items() if len(series)]
    return tuple(sorted(found, key=lambda summary: role_order(summary.key)))


def group_counts(metrics: tuple[MetricSummary, ...]) -> str:
    """Return `31: 12 optimisation, 8 reward, …`."""
    counts = Counter(metric.group for metric in metrics).most_common()
    return f"{len(metrics)}: " + listed(f"{count} {group}" for group, count in counts)


def phases(run: AnalysedRun, role: str) -> str:
    """Describe the level of a metric in each third of the run, and whether its noise shrinks."""
    series = run.get(role)
    parts = [series[part] for part in np.array_split(np.arange(len(series)), 3)]
    if min(map(len, parts)) < MIN_POINTS:
        return ""
    early, middle, late = (number(float(part.values.mean())) for part in parts)
    first, _, last = map(noise, parts)
    change = "shrinking" if last < 0.8 * first else "growing" if last > 1.25 * first else "even"
    return f"early {early}, middle {middle}, late {late}; jitter {change}"


def _summary(run: AnalysedRun, key: str, series: Series) -> MetricSummary:
    entry, points = meaning(key), finite(series) or series[:1]
    low, high = np.argmin(points.values), np.argmax(points.values)
    return MetricSummary(
        key=key,
        group=entry.group,
        unit="" if entry.unit == "1" else entry.unit,
        meaning=entry.meaning,
        direction=entry.better,
        num_points=len(series),
        first=points.values[0],
        last=points.values[-1],
        minimum=points.values[low],
        minimum_step=int(points.steps[low]),
        maximum=points.values[high],
        maximum_step=int(points.steps[high]),
        trend=_trend(run, points),
    )


def _trend(run: AnalysedRun, points: Series) -> str:
    """Return rising, falling or flat, by the means of epochs."""
    if run.profile != "controller":
        points = epoch_means(points, run.find("epoch"), least=MIN_EPOCHS)
    if run.is_rising(points):
        return "rising"
    return "falling" if run.is_falling(points) else "flat"
