"""The report as one HTML page, made from page.html.jinja and, for its plots, from plot.svg.jinja.

Here stands which curves are drawn together and where all of them lies, in plain numbers. Places are
shares of a plot's width and height, 0 to 1, from the left and from above.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from trainer.report import formatting
from trainer.report.curves import (
    NOTHING,
    SMOOTHINGS,
    Scale,
    axis_labels,
    column_bounds,
    decimate,
    gaps,
    scale_of,
    smooth,
)
from trainer.report.formatting import interval, number, percent, shown, step
from trainer.report.result import Anomaly, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import sections
from trainer.report.statistics import bins, finite, within
from trainer.runtime.text import clean_lines

UNITS = 1000
"""Of a path, from the left and from above: the width and height of the template's viewBox."""
NUM_COLUMNS = 400
"""Of a line: finer than a pixel pair of the widest page."""
NUM_HOVER_COLUMNS = 60
MIN_LABEL_GAP_PX = 15
MIN_BAND = 0.002
"""A rectangle without width is not drawn at all."""


SMALL_PX = 120


@dataclass(frozen=True)
class Curve:
    """A series with the css classes of its line, or of the area below it; `label` names it for
    the pointer.
    """

    series: Series
    css: str
    label: str
    end: tuple[float, str] | None = None
    """What stands beside its end, and at which value."""
    dots: Series = NOTHING
    """Its points that are drawn as such."""

    @cached_property
    def known(self) -> Series:
        return finite(self.series)


@dataclass(frozen=True)
class Figure:
    """What is drawn in one plot: curves over stretches of steps in which something happened."""

    title: str
    metric: str
    x: Scale
    curves: tuple[Curve, ...]
    anomalies: tuple[Anomaly, ...] = ()
    is_log: bool = False
    height_px: int = 190

    @cached_property
    def y(self) -> Scale:
        parts = [curve.known.values for curve in self.curves if len(curve.known)]
        ends = [float(end) for values in parts for end in (values.min(), values.max())]
        return scale_of(
            ends + [0.0] * any("area" in curve.css for curve in self.curves), is_log=self.is_log
        )

    @property
    def is_small(self) -> bool:
        return self.height_px == SMALL_PX

    def band(self, steps: tuple[int, int], least: float = MIN_BAND) -> tuple[float, float]:
        """Left edge and width of a stretch of steps."""
        first, last = map(self.x.share, steps)
        width = max(last - first, least)
        return (first + last - width) / 2, width

    def path(self, curve: Curve) -> str:
        """Decimated, in `UNITS`. A point after a gap starts a new stretch; one that stands
        alone shows as a dot.
        """
        kept = decimate(curve.known, NUM_COLUMNS)
        xs = np.rint(UNITS * self.x.place(kept.steps.astype(np.float64))).astype(int)
        ys = np.rint(UNITS * (1 - self.y.place(kept.values))).astype(int)
        starts = [True, *gaps(curve.series, kept)[1:].tolist(), True]
        commands = zip(xs.tolist(), ys.tolist(), starts, starts[1:], strict=False)
        path = "".join(
            f"{'ML'[not at]}{x} {y}{'h0' * (at and then)}" for x, y, at, then in commands
        )
        return f"{path}V{UNITS}H{xs[0]}Z" if "area" in curve.css and path else path

    def dots(self, curve: Curve) -> Iterator[tuple[float, float, str]]:
        """(x, y, title)."""
        shown = curve.known if len(curve.known) == 1 else finite(curve.dots)
        for at, value in decimate(shown, NUM_COLUMNS).by_step().items():
            yield (
                self.x.share(at),
                1 - self.y.share(value),
                f"{curve.label}, step {step(at)}: {number(value)}",
            )

    def bad(self, curve: Curve) -> Iterator[tuple[float, str]]:
        """Place and title of what is not finite."""
        steps = curve.series.steps[~np.isfinite(curve.series.values)]
        columns = (NUM_COLUMNS * self.x.place(steps.astype(np.float64))).astype(int)
        for at in steps[np.unique(columns, return_index=True)[1]].tolist():
            yield self.x.share(at), f"{curve.label} is not finite at step {step(at)}"

    def ticks(self, scale: Scale) -> list[tuple[float, str]]:
        """Place and words; only whole steps."""
        ticks = [tick for tick in scale.ticks() if scale is self.y or tick == int(tick)]
        return list(
            zip(map(scale.share, ticks), axis_labels(ticks, is_log=scale.is_log), strict=True)
        )

    def hovers(self) -> Iterator[tuple[tuple[float, float], str]]:
        """Columns, as bands, with the values that the pointer is told there."""
        lines = [
            (curve.label, curve.known)
            for curve in self.curves
            if "area" not in curve.css and not self.is_small
        ]
        longest = max((series for _, series in lines), key=len, default=NOTHING)
        for first, last in column_bounds(longest, NUM_HOVER_COLUMNS):
            steps = longest[first:last].ends
            parts = [
                (label, part)
                for label, series in lines
                if len(part := within(series, *steps).values)
            ]
            ends = (
                (label, dict.fromkeys(map(number, (part.min(), part.max()))))
                for label, part in parts
            )
            told = [interval(steps), *(f"{label}: {' to '.join(words)}" for label, words in ends)]
            yield self.band(steps, 1 / NUM_HOVER_COLUMNS), "\n".join(told)

    def ends(self) -> list[tuple[float, str, str]]:
        """(pixels from above, css, words) beside the curves' ends, apart where they would cover
        each other.
        """
        wanted = [
            (1 - self.y.share(one.end[0]), one.css.split()[0], one.end[1])
            for one in self.curves
            if one.end
        ]
        room = MIN_LABEL_GAP_PX * np.arange(len(wanted))
        places = (
            np.maximum.accumulate(
                self.height_px * np.array([place for place, *_ in sorted(wanted)]) - room
            )
            + room
        )
        places = np.minimum(places, self.height_px - room[::-1])
        return [
            (place, css, words)
            for place, (_, css, words) in zip(places.tolist(), sorted(wanted), strict=True)
        ]


class Drawing(NamedTuple):
    """A figure as an SVG element, with its heading; `last`: a value told above it."""

    title: str
    unit: str
    svg: Markup
    last: float | None = None


class Drawings(NamedTuple):
    """Side by side; small ones are many and have equal widths."""

    drawings: tuple[Drawing, ...]
    title: str = ""
    is_small: bool = False


PHASE = re.compile(r"time/train/(?!step|update|shard|checkpoint|eval)(\w+)_s")
MAX_PHASES, NUM_TIME_BINS = 5, 120
LOG_RATIO = 20.0
"""Highest value over the median from which a curve gets a log axis."""
MAX_ZOOMS, MAX_MOVERS = 12, 4
ZOOM_POINTS = 20
"""Points shown on each side of an anomaly."""
MAX_SMALL = 30
SHOWN = ("train/loss", "train/lr", "train/grad_norm", "val/loss", "train/lr(1e-3)")
"""Have plots of their own."""
GROUP_TITLES = {
    "reward": "Rewards",
    "length": "Lengths",
    "timing": "Time",
    "other": "Other metrics",
}
"""Of groups that are not called by their name."""


class Plots:
    """Of one run; all but the zooms share the x axis. What a plot is made of goes as soon as it
    is drawn.
    """

    def __init__(self, report: Report, log: RunLog) -> None:
        self._report, self._log = report, log
        ends = [end for series in log.series.values() if len(series) for end in series.ends]
        self._x = scale_of(ends, has_margin=False)
        self._units = {metric.key: metric.unit for metric in report.metrics}
        self._template = templates().get_template("plot.svg.jinja")

    def by_section(self) -> Mapping[str, tuple[Drawings, ...]]:
        """Section -> its rows of plots; `loss` and `curves` are sections of plots alone."""
        found = {
            "loss": [Drawings(tuple(self._loss()))],
            "anomalies": list(self._zooms()),
            "learning-rate": [Drawings(tuple(self._optimisation()))],
            "throughput": [Drawings(tuple(self._phases()))],
            "curves": list(self._curves()),
        }
        return {
            section: tuple(row for row in rows if row.drawings) for section, rows in found.items()
        }

    def _loss(self) -> Iterator[Drawing]:
        """Training raw, smoothed by 0.6 and 0.9, and validation."""
        train, val = self._series("train/loss"), self._series("val/loss")
        middle, bold = (smooth(train, weight) for weight in SMOOTHINGS)
        curves = (
            Curve(train, "s1 raw", "train, raw"),
            Curve(middle, "s1 mid", "train"),
            Curve(bold, "s1 bold", "train", _named("train", bold)),
            Curve(val, "s2 bold", "val", _named("val", val), dots=val),
        )
        if len(train) or len(val):
            yield self._drawn("", "train/loss", *curves, height_px=300)

    def _optimisation(self) -> Iterator[Drawing]:
        """Learning rate, and gradient norm on a log axis."""
        for key, title, css in (
            ("train/lr", "Learning rate", "s4"),
            ("train/grad_norm", "Gradient norm", "s3"),
        ):
            curve = Curve(self._series(key), f"{css} thin", title)
            if len(known := curve.known.values):
                is_log = key == "train/grad_norm" and bool((known > 0).all())
                yield self._drawn(title + " (log)" * is_log, key, curve, is_log=is_log)

    def _phases(self) -> Iterator[Drawing]:
        """Seconds a step, stacked by phase: the largest ones, and the rest as one."""
        named = {
            match[1]: self._series(key)
            for key in self._log.series
            if (match := PHASE.fullmatch(key))
        }
        found = {name: known for name, series in named.items() if len(known := finite(series))}
        if not found:
            return
        steps = np.rint(np.linspace(self._x.low, self._x.high, NUM_TIME_BINS)).astype(np.int64)
        parts_of = {name: bins(known, NUM_TIME_BINS) for name, known in found.items()}
        means = {name: np.interp(steps, part.steps, part.values) for name, part in parts_of.items()}
        largest = sorted(means, key=lambda name: -means[name].sum())
        parts = {name: means[name] for name in largest[:MAX_PHASES]}
        if rest := largest[MAX_PHASES:]:
            parts["rest"] = np.sum([means[name] for name in rest], axis=0)
        areas, top = [], np.zeros(NUM_TIME_BINS)
        for place, (name, seconds) in enumerate(parts.items(), 1):
            top = top + seconds
            areas.append(
                Curve(
                    Series(steps, top),
                    f"s{place} area",
                    name,
                    (float(top[-1] - seconds[-1] / 2), name),
                )
            )
        yield self._drawn("Time of a step by phase", "", *areas[::-1], anomalies=(), height_px=220)

    def _zooms(self) -> Iterator[Drawings]:
        """Each anomaly from near, with the metrics that moved with it."""
        strongest = sorted(self._report.anomalies, key=lambda anomaly: -abs(anomaly.z))[:MAX_ZOOMS]
        for anomaly in sorted(strongest, key=lambda anomaly: anomaly.steps):
            keys = dict.fromkeys((anomaly.metric, *(mover.metric for mover in anomaly.movers)))
            drawn = tuple(
                self._zoom(key, anomaly)
                for key in list(keys)[: 1 + MAX_MOVERS]
                if len(self._series(key))
            )
            title = f"{interval(anomaly.steps).capitalize()}, {percent(anomaly.percent)} of the run"
            yield Drawings(drawn, title, is_small=True)

    def _zoom(self, key: str, anomaly: Anomaly) -> Drawing:
        series = self._series(key)
        first, last = np.searchsorted(series.steps, [anomaly.steps[0], anomaly.steps[1] + 1])
        near = series[max(0, int(first) - ZOOM_POINTS) : int(last) + ZOOM_POINTS]
        dots = within(near, *anomaly.steps) if len(near) <= 4 * ZOOM_POINTS else NOTHING
        x = scale_of(near.steps.tolist(), has_margin=False)
        curve = Curve(near, "s5 mid", key, dots=dots)
        return self._drawn(
            key, key, curve, x=x, anomalies=(anomaly,), is_log=_is_wide(series), height_px=SMALL_PX
        )

    def _curves(self) -> Iterator[Drawings]:
        """All other metrics, small, by group."""
        by_group: dict[str, list[str]] = {}
        for metric in self._report.metrics:
            is_shown = metric.key in SHOWN or PHASE.fullmatch(metric.key)
            if not is_shown and len(self._series(metric.key)):
                by_group.setdefault(metric.group, []).append(metric.key)
        for group, keys in by_group.items():
            title = GROUP_TITLES.get(group, group.capitalize())
            more = f" (the first {MAX_SMALL} of {len(keys)})" if len(keys) > MAX_SMALL else ""
            yield Drawings(tuple(map(self._small, keys[:MAX_SMALL])), title + more, is_small=True)

    def _small(self, key: str) -> Drawing:
        raw = Curve(self._series(key), "s1 thin raw", key)
        smoothed = Curve(smooth(raw.known, SMOOTHINGS[-1]), "s1 mid", key)
        drawn = self._drawn(key, key, raw, smoothed, is_log=_is_wide(raw.known), height_px=SMALL_PX)
        return drawn._replace(last=float(raw.known.values[-1]) if len(raw.known) else math.nan)

    def _drawn(self, title: str, metric: str, *curves: Curve, **options: Any) -> Drawing:
        """Over the whole run, with its anomalies, unless the options say otherwise."""
        figure = Figure(
            title,
            metric,
            **{"x": self._x, "anomalies": self._report.anomalies, **options},
            curves=curves,
        )
        svg = self._template.render(figure=figure, report=self._report, log=self._log)
        return Drawing(title, self._units.get(metric, "" if metric else "s"), Markup(svg))

    def _series(self, key: str) -> Series:
        return self._log.series.get(key, NOTHING)


def _named(label: str, series: Series) -> tuple[float, str] | None:
    last = finite(series).values[-1:].tolist()
    return (last[0], f"{label} {number(last[0])}") if last else None


def _is_wide(series: Series) -> bool:
    """Peaks so high that only a log axis shows the usual level beside them."""
    values = finite(series).values
    return (
        bool(len(values))
        and bool(values.min() > 0)
        and bool(values.max() > LOG_RATIO * np.median(values))
    )


@cache
def templates() -> Environment:
    """All that a page shows is escaped; control characters that names may hold do not reach it."""

    def finalize(value: object) -> object:
        return value if isinstance(value, Markup) else clean_lines(shown(value))

    environment = Environment(
        loader=PackageLoader("trainer.report", ""),
        autoescape=select_autoescape(("html.jinja", "svg.jinja"), default_for_string=False),
        trim_blocks=True,
        finalize=finalize,
        undefined=StrictUndefined,
    )
    names = ("companions", "facts", "interval", "place", "share", "shown")
    environment.filters |= {name: getattr(formatting, name) for name in names}
    environment.filters |= {
        "breakable": _breakable,
        "counts": Counter,
        "pc": lambda place: f"{100 * place:.2f}%",
    }
    return environment


def _breakable(name: str) -> Markup:
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(clean_lines(name)))))


COURSES = {"train/loss": "Training loss", "reward": "Reward"}
"""Told in the head of the page, as far as they were logged."""


def as_page(runs: Sequence[tuple[Report, RunLog]]) -> str:
    """Return the whole page, one article a run."""
    template = templates().get_template("page.html.jinja")
    return template.render(runs=[_content(report, log) for report, log in runs])


def _content(report: Report, log: RunLog) -> dict[str, object]:
    plots = Plots(report, log).by_section()
    blocks = [(section, plots.get(section.id, ())) for section in sections(report)]
    shown = [(section, rows) for section, rows in blocks if rows or not section.is_empty]
    return {"report": report, "log": log, "blocks": shown, "courses": list(_courses(log))}


def _courses(log: RunLog) -> Iterator[tuple[str, float, float]]:
    """(name, first, last)."""
    for key, name in COURSES.items():
        if len(curve := smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]).values):
            yield name, float(curve[0]), float(curve[-1])
