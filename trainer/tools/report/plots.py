"""Plots of a run as SVG images that need nothing from outside."""

import io
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.sections import Plot
from trainer.tools.report.smoothing import smooth, thinned
from trainer.tools.report.statistics import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_RATIO = 20.0
"""Highest value over the median from which an axis is logarithmic."""
LIMIT = 1e100
"""Beyond it an axis overflows."""
PLACE = (0.1, 0.18, 0.88, 0.74)
"""Place of the axes in a figure: left, bottom, width, height."""
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "axes.grid": True}
RAW, SMOOTH, VALIDATION = "#9cc4e4", "#0b66b2", "#c8520a"
ANOMALY, BAD, BEST = "#f2b705", "#b3261e", "#0a7d5e"


def drawn(plot: Plot, report: Report, log: RunLog) -> str:
    """Return the image of a plot as `data:`; names of the log are not in it."""
    # matplotlib takes half a second to import; only the page needs it
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.add_axes(PLACE)
        for key in plot.keys:
            _draw(axes, log.series[key], is_validation=key in ROLES["val_loss"])
        if all(_is_wide(log.series[key]) for key in plot.keys):
            axes.set_yscale("log")
        for anomaly in report.anomalies:
            axes.axvspan(*anomaly.steps, color=ANOMALY, alpha=0.35, linewidth=1)
        _mark(axes, [state.step for state in log.checkpoints], 0.0, "^", "gray")
        if report.generalisation is not None:
            axes.axvline(report.generalisation.best_step, color=BEST, linestyle="--", linewidth=1)
        axes.set_xlabel("epoch" if report.profile == "controller" else "step")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"


def _draw(axes: "Axes", series: Series, *, is_validation: bool) -> None:
    """Draw a curve, pale with its smoothed course over it; validations as points."""
    known = finite(series)
    if is_validation:
        _plot(axes, known, "o-", color=VALIDATION, markersize=4)
    else:
        _plot(axes, known, "-", color=RAW, linewidth=0.8)
        _plot(axes, smooth(known), "-", color=SMOOTH)
    bad = thinned(Series(series.steps, (~np.isfinite(series.values)).astype(float)))
    _mark(axes, bad.steps[bad.values > 0], 1.0, "x", BAD)


def _plot(axes: "Axes", series: Series, form: str, **style: Any) -> None:
    points = thinned(series)
    axes.plot(points.steps, np.clip(points.values, -LIMIT, LIMIT), form, **style)


def _mark(axes: "Axes", steps: Any, height: float, form: str, color: str) -> None:
    """Mark steps at a height of the axes from 0 to 1."""
    heights = np.full(len(steps), height)
    place = axes.get_xaxis_transform()
    axes.plot(steps, heights, form, color=color, transform=place, clip_on=False)


def _is_wide(series: Series) -> bool:
    """Return whether only a logarithmic axis shows the usual level beside the peaks."""
    values = finite(series).values
    is_positive = len(values) > 0 and values.min() > 0
    return bool(is_positive and LOG_RATIO * np.median(values) < values.max())
