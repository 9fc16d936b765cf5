"""The report as one HTML page, made from page.html.jinja: which curves stand together, and what is marked on them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from trainer.report.formatting import clean_lines, companions, facts, interval, number, percent, place, share, step
from trainer.report.result import Anomaly, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import STATUSES, sections
from trainer.report.statistics import finite, within
from trainer.report.svg import NOTHING, SMOOTHINGS, Panel, Scale, bin_means, scale_of, smooth

PHASE = re.compile(r"time/train/(?!step|update|shard|checkpoint|eval)(\w+)_s")
MAX_PHASES, NUM_TIME_BINS = 5, 120
LOG_RATIO = 20.0
"""Highest value over the median from which a curve gets a log axis."""
MAX_ZOOMS, MAX_MOVERS = 12, 4
ZOOM_POINTS = 20
"""Points shown on each side of an anomaly."""
MAX_SMALL, SMALL_PX = 30, 120
SHOWN = ("train/loss", "train/lr", "train/grad_norm", "val/loss", "train/lr(1e-3)")
"""Have plots of their own."""
GROUP_TITLES = {"reward": "Rewards", "length": "Lengths", "timing": "Time", "other": "Other metrics"}
"""Of groups that are not called by their name."""


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading; `key` explains its signs and colours, as (css, words)."""

    title: str
    svg: str
    unit: str
    key: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FigureRow:
    """Figures side by side; small ones are many and have equal widths."""

    title: str
    figures: tuple[Figure, ...]
    is_small: bool = False


def figures(report: Report, log: RunLog) -> Mapping[str, tuple[FigureRow, ...]]:
    """Section -> its rows of plots; `loss` and `curves` are sections of plots alone."""
    plots = Plots(report, log)
    found = {
        "loss": (FigureRow("", tuple(plots.loss())),),
        "anomalies": tuple(plots.zooms()),
        "learning-rate": (FigureRow("", tuple(plots.optimisation())),),
        "throughput": (FigureRow("", tuple(plots.phases())),),
        "curves": tuple(plots.curves()),
    }
    return {section: tuple(row for row in rows if row.figures) for section, rows in found.items()}


class Plots:
    """Draws for one run; all its plots but the zooms share the x axis."""

    def __init__(self, report: Report, log: RunLog) -> None:
        self._report, self._log = report, log
        self._x_name = "epoch" if report.profile == "controller" else "step"
        ends = [end for series in log.series.values() if len(series) for end in series.ends]
        self._x = scale_of(ends, has_margin=False)
        self._units = {metric.key: metric.unit for metric in report.metrics}

    def loss(self) -> Iterable[Figure]:
        """Training raw, smoothed by 0.6 and 0.9, validation, anomalies, checkpoints, the best step."""
        train, val = self._series("train/loss"), self._series("val/loss")
        if not len(train) and not len(val):
            return
        panel = self._panel(_y_scale(train, val), height_px=300)
        panel.line(train, label="train, raw", css="s1 raw", is_named=False)
        for weight, css in zip(SMOOTHINGS, ("mid", "bold"), strict=True):
            panel.line(smooth(train, weight), label="train", css=f"s1 {css}", is_named=weight == SMOOTHINGS[-1])
        panel.line(val, label="val", css="s2 bold")
        panel.points(val, label="val", css="s2")
        for state in self._log.checkpoints:
            panel.mark(state.step, title=f"checkpoint of step {step(state.step)}", css="checkpoint", sign="▲")
        if (found := self._report.generalisation) is not None:
            title = f"best {found.metric} {number(found.best_value)} at step {step(found.best_step)}"
            sign = f"★ best {number(found.best_value)}"
            panel.mark(found.best_step, title=title, css="best", sign=sign, is_above=True)
        key = [("s1", "training, smoothed 0.6 and 0.9")]
        key += [("s2", "validation")] * bool(len(val))
        key += [("band", "anomaly")] * bool(self._report.anomalies)
        key += [("checkpoint", "▲ checkpoint")] * bool(self._log.checkpoints)
        yield self._figure(panel, "", "train/loss", key)

    def optimisation(self) -> Iterable[Figure]:
        """Learning rate, and gradient norm on a log axis."""
        for key, title, css in (("train/lr", "Learning rate", "s4"), ("train/grad_norm", "Gradient norm", "s3")):
            series = self._series(key)
            if len(known := finite(series).values):
                is_log = key == "train/grad_norm" and bool((known > 0).all())
                panel = self._panel(_y_scale(series, is_log=is_log), height_px=190)
                panel.line(series, label=title, css=f"{css} thin", is_named=False)
                yield self._figure(panel, title + " (log)" * is_log, key)

    def phases(self) -> Iterable[Figure]:
        """Seconds a step, stacked by phase: the largest ones, and the rest as one."""
        named = {match[1]: self._series(key) for key in self._log.series if (match := PHASE.fullmatch(key)) is not None}
        found = {name: series for name, series in named.items() if len(finite(series))}
        if not found:
            return
        num_bins = min(NUM_TIME_BINS, max(map(len, found.values())))
        edges = np.linspace(self._x.low, self._x.high, num_bins + 1)
        means = {name: np.nan_to_num(bin_means(series, edges)) for name, series in found.items()}
        largest = sorted(means, key=lambda name: -means[name].sum())
        parts = [(name, f"s{index + 1}", means[name]) for index, name in enumerate(largest[:MAX_PHASES])]
        if rest := largest[MAX_PHASES:]:
            parts.append(("rest", "s6", np.sum([means[name] for name in rest], axis=0)))
        total = np.sum([values for _, _, values in parts], axis=0)
        panel = Panel(self._x, scale_of([0.0, *total.tolist()]), height_px=220)
        panel.stack(edges, parts)
        yield self._figure(panel, "Time of a step by phase", "time/train/step_s", unit="s")

    def zooms(self) -> Iterable[FigureRow]:
        """Each anomaly from near, with the metrics that moved with it."""
        strongest = sorted(self._report.anomalies, key=lambda anomaly: -abs(anomaly.z))[:MAX_ZOOMS]
        for anomaly in sorted(strongest, key=lambda anomaly: anomaly.steps):
            keys = dict.fromkeys((anomaly.metric, *(mover.metric for mover in anomaly.movers)))
            drawn = tuple(self._zoom(key, anomaly) for key in list(keys)[: 1 + MAX_MOVERS] if len(self._series(key)))
            title = f"{interval(anomaly.steps).capitalize()}, {percent(anomaly.percent)} of the run"
            yield FigureRow(title, drawn, is_small=True)

    def curves(self) -> Iterable[FigureRow]:
        """All other metrics, small, by group."""
        by_group: dict[str, list[str]] = {}
        for metric in self._report.metrics:
            is_shown = metric.key in SHOWN or PHASE.fullmatch(metric.key)
            if not is_shown and len(self._series(metric.key)):
                by_group.setdefault(metric.group, []).append(metric.key)
        for group, keys in by_group.items():
            title = GROUP_TITLES.get(group, group.capitalize())
            more = f" (the first {MAX_SMALL} of {len(keys)})" if len(keys) > MAX_SMALL else ""
            yield FigureRow(title + more, tuple(map(self._small, keys[:MAX_SMALL])), is_small=True)

    def _small(self, key: str) -> Figure:
        series = self._series(key)
        panel = self._panel(_y_scale(series, is_log=_is_wide(series)), height_px=SMALL_PX, has_hover=False)
        panel.line(series, label=key, css="s1 thin raw", is_named=False)
        panel.line(smooth(series, SMOOTHINGS[-1]), label=key, css="s1 mid", is_named=False)
        known = finite(series).values
        return self._figure(panel, key, key, [("last", f"last {number(float(known[-1]) if len(known) else None)}")])

    def _zoom(self, key: str, anomaly: Anomaly) -> Figure:
        series = self._series(key)
        first, last = np.searchsorted(series.steps, [anomaly.steps[0], anomaly.steps[1] + 1])
        near = series[max(0, int(first) - ZOOM_POINTS) : int(last) + ZOOM_POINTS]
        x = scale_of(near.steps.tolist(), has_margin=False)
        panel = Panel(x, _y_scale(near, is_log=_is_wide(series)), height_px=SMALL_PX, has_hover=False)
        panel.band(anomaly.steps, interval(anomaly.steps))
        panel.line(near, label=key, css="s5 mid", is_named=False)
        if len(near) <= 4 * ZOOM_POINTS:
            panel.points(within(near, *anomaly.steps), label=key, css="s5")
        return self._figure(panel, key, key)

    def _panel(self, y: Scale, *, height_px: int, has_hover: bool = True) -> Panel:
        """Over the whole run, with its anomalies."""
        panel = Panel(self._x, y, height_px=height_px, has_hover=has_hover)
        for anomaly in self._report.anomalies:
            with_them = f"\n{companions(anomaly)}" if anomaly.movers else ""
            title = f"{interval(anomaly.steps)}: {anomaly.metric} {number(anomaly.peak_value)}{with_them}"
            panel.band(anomaly.steps, title)
        return panel

    def _figure(
        self, panel: Panel, title: str, key: str, signs: Iterable[tuple[str, str]] = (), *, unit: str = ""
    ) -> Figure:
        svg = panel.render(label=f"{title or key} over {self._x_name}s", x_name=self._x_name)
        return Figure(title, svg, unit or self._units.get(key, ""), tuple(signs))

    def _series(self, key: str) -> Series:
        return self._log.series.get(key, NOTHING)


def _y_scale(*series: Series, is_log: bool = False) -> Scale:
    known = [values for one in series if len(values := finite(one).values)]
    return scale_of([float(end) for values in known for end in (values.min(), values.max())], is_log=is_log)


def _is_wide(series: Series) -> bool:
    """Peaks so high that only a log axis shows the usual level beside them."""
    values = finite(series).values
    return bool(len(values)) and bool(values.min() > 0) and bool(values.max() > LOG_RATIO * np.median(values))


LEVELS = {"FAIL": "fail", "ATTENTION": "warn", "OK": "ok", "INSUFFICIENT": "info"}

Tile = tuple[str, str, str]
"""Name, value, and what is to be known about it."""


def as_page(runs: Sequence[tuple[Report, RunLog]], *, refresh_s: int = 0) -> str:
    """The whole page, one article a run; a browser loads it again every `refresh_s` seconds, unless that is 0."""
    template = _environment().get_template("page.html.jinja")
    return template.render(runs=[_content(report, log) for report, log in runs], refresh_s=refresh_s)


def _environment() -> Environment:
    """All that a template shows is escaped, and without control characters."""

    def finalize(value: object) -> object:
        return clean_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "finalize": finalize}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)
    environment.filters["place"] = place
    environment.filters["breakable"] = lambda name: Markup(re.sub("([/_])", r"\1<wbr>", str(escape(clean_lines(name)))))
    return environment


def _content(report: Report, log: RunLog) -> dict[str, object]:
    plots = figures(report, log)
    blocks = [(section, plots.get(section.id, ())) for section in sections(report)]
    short, long = facts(report)
    return {
        "report": report,
        "level": LEVELS[report.verdict],
        "facts": short,
        "long_facts": long,
        "tiles": list(_tiles(report, log)),
        "blocks": [(section, rows) for section, rows in blocks if rows or not section.is_empty],
    }


def _tiles(report: Report, log: RunLog) -> Iterator[Tile]:
    for key, name in (("train/loss", "Training loss"), ("reward", "Reward")):
        if len(curve := smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]).values):
            yield name, number(float(curve[-1])), f"from {number(float(curve[0]))}, smoothed"
    if (found := report.generalisation) is not None:
        yield "Best validation", number(found.best_value), f"{found.metric} at step {step(found.best_step)}"
    if report.anomalies:
        open_ = sum(not anomaly.has_recovered for anomaly in report.anomalies)
        yield "Anomalies", str(len(report.anomalies)), f"{open_} not recovered" if open_ else "all recovered"
    if (speed := report.throughput) is not None:
        rate = f"{number(speed.tokens_per_s)} tokens/s" if speed.tokens_per_s is not None else "median"
        yield "Step time", f"{number(speed.step_s)} s", rate
        if speed.mfu is not None:
            yield "MFU", share(speed.mfu), "of the peak"
    if report.checklist:
        counts = {status: sum(item.status == status for item in report.checklist) for status in STATUSES}
        passed = f"{counts.pop('pass')} of {len(report.checklist)}"
        yield "Checklist", passed, ", ".join(f"{count} {status}" for status, count in counts.items())
