"""Plots of a run as SVG images that need nothing from outside."""

import io
from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.report.names import ROLES
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.smoothing import smooth, thinned
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
    losses = [key for key in LOSSES if key in log.series]
    if losses:
        yield Plot("Loss", ", ".join(losses), _drawn(losses, report, log))
    moved = {mover.metric for anomaly in report.anomalies for mover in anomaly.movers}
    wanted = moved.union(*ROLES.values()) - {*LOSSES, *ROLES["epoch"]}
    varying = [one for one in report.metrics if one.key in wanted and one.minimum < one.maximum]
    for metric in varying[:MAX_PLOTS]:
        yield Plot(metric.key, metric.observation, _drawn([metric.key], report, log))


def _drawn(keys: list[str], report: Report, log: RunLog) -> str:
    # matplotlib takes half a second to import; only the page needs it
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.add_axes(PLACE)
        for key in keys:
            _draw(axes, log.series[key], is_validation=key in ROLES["val_loss"])
        if all(_is_wide(log.series[key]) for key in keys):
            axes.set_yscale("log")
        _mark(axes, report, log)
        axes.set_xlabel("epoch" if report.profile == "controller" else "step")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"


def _draw(axes: "Axes", series: Series, *, is_validation: bool) -> None:
    """Draw a curve, pale with its smoothed course over it; validations as points."""
    known = finite(series)
    points = thinned(known)
    values = np.clip(points.values, -LIMIT, LIMIT)
    if is_validation:
        axes.plot(points.steps, values, "o-", color=VALIDATION, markersize=4)
    else:
        mean = thinned(smooth(known))
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
