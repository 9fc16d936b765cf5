"""Plots of a run as SVG images that need nothing from outside."""

import io
from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.report.formatting import number
from trainer.report.names import ROLES
from trainer.report.result import MetricSummary, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.smoothing import SMOOTHINGS, smooth, thinned
from trainer.report.statistics import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PLOTS = 12
"""Beside the loss."""
LOG_RATIO = 20.0
"""Highest value over the median from which an axis is logarithmic."""
LIMIT = 1e100
"""Beyond it an axis overflows."""
PLACE = (0.1, 0.18, 0.88, 0.74)
"""Of the axes in a figure: left, bottom, width, height."""
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "axes.grid": True}
RAW, SMOOTH, VALIDATION = "#9cc4e4", "#0b66b2", "#c8520a"
ANOMALY, BAD, BEST = "#f2b705", "#b3261e", "#0a7d5e"
LOSSES = (*ROLES["loss"], *ROLES["val_loss"])


class Plot(NamedTuple):
    title: str
    about: str
    uri: str
    """The image as `data:`; names of the log are not in it."""


def plots(report: Report, log: RunLog) -> Iterator[Plot]:
    """Draw the loss, then the metrics that findings ask for or that left their usual range."""
    metrics = {metric.key: metric for metric in report.metrics}
    losses = [metrics[key] for key in LOSSES if key in metrics]
    if losses:
        about = "; ".join(f"{one.key} {number(one.last)} at the end" for one in losses)
        yield _drawn("Loss", about, losses, report, log)
    moved = {mover.metric for anomaly in report.anomalies for mover in anomaly.movers}
    wanted = moved.union(*ROLES.values()) - {*LOSSES, *ROLES["epoch"]}
    varying = [one for one in report.metrics if one.key in wanted and one.minimum < one.maximum]
    for metric in varying[:MAX_PLOTS]:
        unit = f" [{metric.unit}]" if metric.unit else ""
        yield _drawn(metric.key + unit, metric.observation, [metric], report, log)


def _drawn(
    title: str, about: str, metrics: list[MetricSummary], report: Report, log: RunLog
) -> Plot:
    # matplotlib takes half a second to import; only the page needs it
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.add_axes(PLACE)
        for metric in metrics:
            _draw(axes, log.series[metric.key], is_validation=metric.key in ROLES["val_loss"])
        if all(_is_wide(log.series[metric.key]) for metric in metrics):
            axes.set_yscale("log")
        _mark(axes, report, log)
        axes.set_xlabel("epoch" if report.profile == "controller" else "step")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    uri = f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
    return Plot(title, about, uri)


def _draw(axes: "Axes", series: Series, *, is_validation: bool) -> None:
    """Draw a curve, pale with its smoothed course over it; validations as points."""
    known = finite(series)
    points = thinned(known)
    values = np.clip(points.values, -LIMIT, LIMIT)
    if is_validation:
        axes.plot(points.steps, values, "o-", color=VALIDATION, markersize=4)
    else:
        mean = thinned(smooth(known, SMOOTHINGS[-1]))
        axes.plot(points.steps, values, color=RAW, linewidth=0.8)
        axes.plot(mean.steps, np.clip(mean.values, -LIMIT, LIMIT), color=SMOOTH)
    bad = thinned(Series(series.steps, (~np.isfinite(series.values)).astype(float)))
    steps = bad.steps[bad.values > 0]
    axes.plot(steps, np.ones(len(steps)), "x", color=BAD, transform=axes.get_xaxis_transform())


def _is_wide(series: Series) -> bool:
    """Return whether only a logarithmic axis shows the usual level beside the peaks."""
    values = finite(series).values
    return bool(
        len(values) and 0 < LOG_RATIO * np.median(values) < values.max() and values.min() > 0
    )


def _mark(axes: "Axes", report: Report, log: RunLog) -> None:
    """Mark anomalies, checkpoints and the best validation."""
    for anomaly in report.anomalies:
        axes.axvspan(*anomaly.steps, color=ANOMALY, alpha=0.35, linewidth=1)
    steps = [state.step for state in log.checkpoints]
    zeros = np.zeros(len(steps))
    axes.plot(steps, zeros, "^", color="gray", transform=axes.get_xaxis_transform(), clip_on=False)
    if report.generalisation is not None:
        axes.axvline(report.generalisation.best_step, color=BEST, linestyle="--", linewidth=1)
