"""The slow course of every metric: slope, significance, thirds, the last ten epochs."""

from collections.abc import Mapping

import numpy as np

from trainer.report.analysed_run import AnalysedRun
from trainer.report.result import Trend
from trainer.report.run_log import Series
from trainer.report.statistics import bins, epoch_means, finite, noise, slope
from trainer.report.vocabulary import role_order

NUM_LAST = 10


def trends(run: AnalysedRun) -> tuple[Trend, ...]:
    """One for each metric with at least four finite points, on epoch means or on 50 bins; in the order of roles."""
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
    change = "shrinking" if jitters[2] < 0.8 * jitters[0] else "growing" if jitters[2] > 1.25 * jitters[0] else "even"
    return f"early {levels[0]}, middle {levels[1]}, late {levels[2]}; jitter {change}"
