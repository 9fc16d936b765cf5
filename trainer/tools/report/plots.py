"""Plots of a run as SVG images without external resources."""

import io
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.sections import Plot
from trainer.tools.report.statistics import finite, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_RATIO = 20.0
"""An axis is logarithmic if the highest value is more than this many times the median."""
LIMIT = 1e100
"""Values are clipped to this size; an axis overflows beyond it."""
MAX_MARKS = 400
NUM_COLUMNS = 400
"""A long curve is divided into this many parts, and only the extremes of each are drawn."""
AXES = (0.1, 0.18, 0.88, 0.74)
"""Left, bottom, width and height of the axes in a figure."""
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "axes.grid": True}
RAW, SMOOTH, VALIDATION = "#9cc4e4", "#0b66b2", "#c8520a"
ANOMALY, BAD, BEST = "#f2b705", "#b3261e", "#0a7d5e"


def thinned(series: Series) -> Series:
    """Return a series of finite values with only the lowest and highest point of each of its
    `NUM_COLUMNS` parts. A short series is returned unchanged.
    """
    if len(series) <= 2 * NUM_COLUMNS:
        return series
    parts = np.array_split(np.arange(len(series)), NUM_COLUMNS)
    kept = [part[place(series.values[part])] for part in parts for place in (np.argmin, np.argmax)]
    return series[np.unique(kept)]


def drawn(plot: Plot, report: Report, log: RunLog) -> str:
    """Return a plot as a `data:` URL of an image. The image contains no names from the log."""
    # matplotlib takes half a second to import; only the page needs it
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    image = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.add_axes(AXES)
        for key in plot.keys:
            _draw(axes, log.series[key], is_validation=key in ROLES["val_loss"])
        for anomaly in report.anomalies:
            axes.axvspan(
                *anomaly.steps,
                color=ANOMALY,
                alpha=0.35,
                linewidth=1,
            )
        if report.generalisation is not None:
            axes.axvline(
                report.generalisation.best_step,
                color=BEST,
                linestyle="--",
                linewidth=1,
            )
        axes.set_xlabel("epoch" if report.profile == "controller" else "step")
        figure.savefig(image, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(image.getvalue()).decode()}"


def _draw(axes: "Axes", series: Series, *, is_validation: bool) -> None:
    """Draw a curve in a pale color with its smoothed course on top; draw validations as points."""
    known = finite(series)
    if is_validation:
        _plot(axes, known, "o-", color=VALIDATION, markersize=4)
    else:
        _plot(axes, known, "-", color=RAW, linewidth=0.8)
        _plot(axes, smooth(known), "-", color=SMOOTH)
    bad = series.steps[~np.isfinite(series.values)]
    shown = bad[:: len(bad) // MAX_MARKS + 1]
    axes.plot(shown, np.ones(len(shown)), "x", color=BAD, transform=axes.get_xaxis_transform())
    if known and 0 < known.values.min() < LOG_RATIO * np.median(known.values) < known.values.max():
        axes.set_yscale("log")


def _plot(
    axes: "Axes",
    series: Series,
    form: str,
    **style: Any,
) -> None:
    points = thinned(series)
    axes.plot(points.steps, np.clip(points.values, -LIMIT, LIMIT), form, **style)
