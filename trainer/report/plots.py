"""The plots of a report: which curves stand together, and what is marked on them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, bin_means, finite, smooth, within
from trainer.report.formatting import clean, companions, interval, number, percent, step
from trainer.report.result import Anomaly, MetricSummary, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.svg import Panel, Scale, scale_of

PHASE = re.compile(r"time/train/(?!step|update|shard|checkpoint|eval)(\w+)_s")
MAX_PHASES = 5
NUM_TIME_BINS = 120
LOG_RATIO = 20.0
"""Highest value over the median from which a curve gets a log axis."""
MAX_ZOOMS, MAX_MOVERS = 12, 4
ZOOM_POINTS = 20
"""Points shown on each side of an anomaly."""
MAX_SMALL = 30
SMALL_PX = 120
SHOWN = ("train/loss", "train/lr", "train/grad_norm", "val/loss", "train/lr(1e-3)")
"""Have plots of their own."""
CURVE_GROUPS = {
    "optimisation": "Optimisation",
    "validation": "Validation",
    "reward": "Rewards",
    "length": "Lengths",
    "state": "State",
    "memory": "Memory",
    "data": "Data",
    "timing": "Time",
    "other": "Other metrics",
}


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading; `key` explains its signs and colours, as (css, words)."""

    title: str
    svg: str
    unit: str = ""
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FigureRow:
    """Figures side by side; small ones are many and have equal widths."""

    title: str
    figures: tuple[Figure, ...]
    is_small: bool = False


class Plots:
    """Draws for one run; all its plots but the zooms share the x axis."""

    def __init__(self, report: Report, log: RunLog) -> None:
        self._report, self._log = report, log
        self._x_name = "epoch" if report.profile == "controller" else "step"
        ends = [int(end) for series in log.series.values() if len(series) for end in series.steps[[0, -1]]]
        self._x = scale_of(ends, has_margin=False)
        self._units = {metric.key: metric.unit for metric in report.metrics}

    def loss(self) -> tuple[FigureRow, ...]:
        """Training raw, smoothed by 0.6 and 0.9, validation, anomalies, checkpoints, the best step."""
        train, val = self._series("train/loss"), self._series("val/loss")
        if not len(train) and not len(val):
            return ()
        panel = Panel(self._x, _y_scale(train, val), height_px=300)
        self._draw_events(panel)
        key = [("s1", "training, smoothed 0.6 and 0.9")]
        panel.line(train, label="train, raw", css="s1 raw", is_named=False)
        for weight, css in zip(SMOOTHINGS, ("mid", "bold"), strict=True):
            panel.line(smooth(train, weight), label="train", css=f"s1 {css}", is_named=weight == SMOOTHINGS[-1])
        if len(val):
            panel.line(val, label="val", css="s2 bold")
            panel.points(val, label="val", css="s2")
            key.append(("s2", "validation"))
        key += self._event_key()
        return (FigureRow("", (self._figure(panel, "", "train/loss", tuple(key)),)),)

    def optimisation(self) -> tuple[FigureRow, ...]:
        """Learning rate, and gradient norm on a log axis."""
        figures = []
        for key, title, css in (("train/lr", "Learning rate", "s4"), ("train/grad_norm", "Gradient norm", "s3")):
            series = self._series(key)
            if len(finite(series)):
                is_log = key == "train/grad_norm" and bool((finite(series).values > 0).all())
                panel = Panel(self._x, _y_scale(series, is_log=is_log), height_px=190)
                for anomaly in self._report.anomalies:
                    panel.band(anomaly.steps, _anomaly_title(anomaly))
                panel.line(series, label=title, css=f"{css} thin", is_named=False)
                figures.append(self._figure(panel, title + " (log)" * is_log, key))
        return (FigureRow("", tuple(figures)),) if figures else ()

    def phases(self) -> tuple[FigureRow, ...]:
        """Seconds a step, stacked by phase: the largest ones, and the rest as one."""
        found = {match[1]: self._series(key) for key in self._log.series if (match := PHASE.fullmatch(key)) is not None}
        found = {name: series for name, series in found.items() if len(finite(series))}
        if not found:
            return ()
        edges = np.linspace(self._x.low, self._x.high, NUM_TIME_BINS + 1)
        rows = max(map(len, found.values()))
        if rows < NUM_TIME_BINS:
            edges = np.linspace(self._x.low, self._x.high, rows + 1)
        means = {name: np.nan_to_num(bin_means(series, edges)) for name, series in found.items()}
        largest = sorted(means, key=lambda name: -means[name].sum())
        rest = largest[MAX_PHASES:]
        parts = [(name, f"s{index + 1}", means[name]) for index, name in enumerate(largest[:MAX_PHASES])]
        if rest:
            parts.append(("rest", "s6", np.sum([means[name] for name in rest], axis=0)))
        total = np.sum([values for _, _, values in parts], axis=0)
        panel = Panel(self._x, scale_of([0.0, *total.tolist()]), height_px=220)
        panel.stack(edges, parts)
        return (FigureRow("", (self._figure(panel, "Time of a step by phase", "time/train/step_s", unit="s"),)),)

    def zooms(self) -> tuple[FigureRow, ...]:
        """Each anomaly from near, with the metrics that moved with it."""
        strongest = sorted(self._report.anomalies, key=lambda anomaly: -abs(anomaly.z))[:MAX_ZOOMS]
        rows = []
        for anomaly in sorted(strongest, key=lambda anomaly: anomaly.steps):
            keys = dict.fromkeys((anomaly.metric, *(mover.metric for mover in anomaly.movers)))
            drawn = [self._zoom(key, anomaly) for key in list(keys)[: 1 + MAX_MOVERS]]
            title = f"{interval(anomaly.steps).capitalize()}, {percent(anomaly.percent)} of the run"
            rows.append(FigureRow(title, tuple(figure for figure in drawn if figure is not None), is_small=True))
        return tuple(rows)

    def curves(self) -> tuple[FigureRow, ...]:
        """All other metrics, small, by group."""
        rows = []
        for group, title in CURVE_GROUPS.items():
            metrics = [m for m in self._report.metrics if m.group == group and m.key not in SHOWN]
            drawn = [self._small(metric) for metric in metrics[:MAX_SMALL]]
            figures = tuple(figure for figure in drawn if figure is not None)
            more = f" (the first {MAX_SMALL} of {len(metrics)})" if len(metrics) > MAX_SMALL else ""
            if figures:
                rows.append(FigureRow(title + more, figures, is_small=True))
        return tuple(rows)

    def _small(self, metric: MetricSummary) -> Figure | None:
        series = self._series(metric.key)
        if not len(series) or PHASE.fullmatch(metric.key):
            return None
        panel = Panel(self._x, _y_scale(series, is_log=_is_wide(series)), height_px=SMALL_PX, has_hover=False)
        for anomaly in self._report.anomalies:
            panel.band(anomaly.steps, _anomaly_title(anomaly))
        panel.line(series, label=metric.key, css="s1 thin raw", is_named=False)
        panel.line(smooth(series, SMOOTHINGS[-1]), label=metric.key, css="s1 mid", is_named=False)
        known = finite(series).values
        last = number(float(known[-1])) if len(known) else number(None)
        return self._figure(panel, metric.key, metric.key, ((("last"), f"last {last}"),))

    def _zoom(self, key: str, anomaly: Anomaly) -> Figure | None:
        series = self._series(key)
        first, last = np.searchsorted(series.steps, [anomaly.steps[0], anomaly.steps[1] + 1])
        index = slice(max(0, int(first) - ZOOM_POINTS), int(last) + ZOOM_POINTS)
        near = Series(series.steps[index], series.values[index])
        if not len(near):
            return None
        panel = Panel(
            scale_of(near.steps.tolist(), has_margin=False),
            _y_scale(near, is_log=_is_wide(series)),
            height_px=SMALL_PX,
            has_hover=False,
        )
        panel.band(anomaly.steps, interval(anomaly.steps))
        panel.line(near, label=key, css="s5 mid", is_named=False)
        if len(near) <= 4 * ZOOM_POINTS:
            panel.points(within(near, *anomaly.steps), label=key, css="s5")
        return self._figure(panel, key, key)

    def _draw_events(self, panel: Panel) -> None:
        for anomaly in self._report.anomalies:
            panel.band(anomaly.steps, _anomaly_title(anomaly))
        for state in self._log.checkpoints:
            panel.mark(state.step, title=f"checkpoint of step {step(state.step)}", css="checkpoint", sign="▲")
        if (found := self._report.generalisation) is not None:
            best = f"best {clean(found.metric)} {number(found.best_value)} at step {step(found.best_step)}"
            sign = f"★ best {number(found.best_value)}"
            panel.mark(found.best_step, title=best, css="best", sign=sign, is_above=True)

    def _event_key(self) -> Iterable[tuple[str, str]]:
        if self._report.anomalies:
            yield "band", "anomaly"
        if self._log.checkpoints:
            yield "checkpoint", "▲ checkpoint"

    def _figure(
        self, panel: Panel, title: str, key: str, signs: tuple[tuple[str, str], ...] = (), *, unit: str = ""
    ) -> Figure:
        svg = panel.render(label=f"{title or key} over {self._x_name}s", x_name=self._x_name)
        return Figure(clean(title), svg, unit or clean(self._units.get(key, "")), signs)

    def _series(self, key: str) -> Series:
        return self._log.series.get(key, NOTHING)


def figures(report: Report, log: RunLog) -> Mapping[str, tuple[FigureRow, ...]]:
    """Section -> its rows of plots; `loss` and `curves` are sections of plots alone."""
    plots = Plots(report, log)
    return {
        "loss": plots.loss(),
        "anomalies": plots.zooms(),
        "learning-rate": plots.optimisation(),
        "throughput": plots.phases(),
        "curves": plots.curves(),
    }


def _y_scale(*series: Series, is_log: bool = False) -> Scale:
    known = [finite(one).values for one in series]
    return scale_of([end for values in known if len(values) for end in _ends(values, is_log)], is_log=is_log)


def _ends(values: np.ndarray, is_log: bool) -> tuple[float, float]:
    shown = values[values > 0] if is_log else values
    return float(shown.min()), float(shown.max())


def _is_wide(series: Series) -> bool:
    """Peaks so high that only a log axis shows the usual level beside them."""
    values = finite(series).values
    return bool(len(values)) and bool(values.min() > 0) and bool(values.max() > LOG_RATIO * np.median(values))


def _anomaly_title(anomaly: Anomaly) -> str:
    with_them = f"\n{companions(anomaly)}" if anomaly.movers else ""
    return f"{interval(anomaly.steps)}: {anomaly.metric} {number(anomaly.peak_value)}{with_them}"
