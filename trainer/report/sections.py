"""The sections of a report, of which page and terminal show nothing else, and the rows around
one step.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.detection.window import spread
from trainer.report.formatting import (
    ARROWS,
    MISSING,
    capitalised,
    companions,
    counted,
    interval,
    number,
    percent,
    share,
    shown,
    step,
    told,
)
from trainer.report.result import CheckItem, Finding, Generalisation, MetricSummary, Report
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import finite, within
from trainer.report.vocabulary import role_order

STATUSES = ("fail", "note", "unknown", "pass")
NUM_MAIN_ANOMALIES, NUM_MAIN_PHASES, NUM_MAIN_METRICS, NUM_ORDERS = 5, 4, 8, 3

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; `words` names the columns that hold text and may wrap, the others
    hold numbers.

    Where space is short, `main` are the rows to show, and `details` the columns to leave out.
    """

    header: Row
    rows: tuple[Row, ...]
    words: frozenset[str] = frozenset()
    details: frozenset[str] = frozenset()
    main: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Section:
    """`lead` says it in one sentence; `notes` follow the table."""

    id: str
    title: str
    lead: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing but a place for plots."""
        return not (self.lead or self.table or self.notes or self.findings)


def table_of(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    words: Iterable[str] = (),
    details: Iterable[str] = (),
    main: Iterable[Sequence[object]] = (),
) -> Table | None:
    """Of values, written by their types; None without rows."""
    cells = tuple(tuple(map(shown, row)) for row in rows)
    few = tuple(tuple(map(shown, row)) for row in main)
    return Table(tuple(header), cells, frozenset(words), frozenset(details), few) if cells else None


def sections(report: Report) -> tuple[Section, ...]:
    """In the order in which they are read; the ones that have nothing to say may still have
    plots.
    """
    others = tuple(finding for finding in report.findings if finding not in report.top)
    return (
        Section("top", "What matters", findings=report.top),
        Section("loss", "Loss"),
        Section("findings", "Also found", findings=others),
        _anomalies(report),
        _validation(report),
        _serving(report),
        _evaluations(report),
        _learning_rate(report),
        _throughput(report),
        _checklist(report),
        Section("curves", "All curves"),
        _metrics(report),
        _trends(report),
        _limits(report),
        Section("next", "What next", report.closing),
    )


def _at(value: float, at: int) -> str:
    return f"{number(value)} @ {step(at)}"


def _anomalies(report: Report) -> Section:
    anomalies = report.anomalies
    if not anomalies:
        return Section("anomalies", "Anomalies")
    rows = [
        (
            interval(one.steps).split(" ", 1)[1],
            percent(one.percent),
            one.metric,
            _at(one.peak_value, one.peak_step),
            one.z,
            told(one.ratio, "{}×") or None,
            "yes" if one.has_recovered else "no",
            companions(one) or None,
        )
        for one in anomalies
    ]
    others = (m for one in anomalies for m in one.movers if m.metric != one.metric)
    counts = Counter(f"{mover.metric} {ARROWS[mover.sign]}" for mover in others)
    moved = ", ".join(f"{name} in {count}" for name, count in counts.most_common())
    chains = Counter(" → ".join(one.chain) for one in anomalies if len(one.chain) > 1)
    orders = (
        f"Order of onset in {times} of {len(anomalies)}: {chain}."
        for chain, times in chains.most_common(NUM_ORDERS)
    )
    header = ("steps", "place", "metric", "peak", "z", "to usual", "recovered", "together with")
    details, main = ("z", "together with"), rows[:NUM_MAIN_ANOMALIES]
    return Section(
        "anomalies",
        "Anomalies",
        f"{counted(len(anomalies), 'interval')} in which metrics left their usual range.",
        table_of(header, rows, words=("metric", "together with"), details=details, main=main),
        (*([f"Moved with them: {moved}."] if moved else []), *orders),
    )


def _validation(report: Report) -> Section:
    best = report.generalisation
    if best is None:
        return Section("validation", "Generalisation")
    side = "above" if best.gap >= 0 else "below"
    gap = (
        ""
        if math.isnan(best.gap)
        else f"; validation is {number(abs(best.gap))} {side} training at the end"
    )
    marks = {
        "best": best.best_step,
        "recommended": best.recommended_step,
        "overfits from here": best.overfit_step,
    }
    rows = [
        (at, best.values[at], verdict, ", ".join(mark for mark in marks if marks[mark] == at))
        for at, verdict in sorted(best.verdicts.items())
    ]
    main = [row for row in rows if row[-1] or row is rows[-1]]
    return Section(
        "validation",
        "Generalisation",
        f"{capitalised(best.metric)}: best {number(best.best_value)} at step "
        f"{step(best.best_step)}, last {number(best.last_value)}{gap}.",
        table_of(
            ("step", best.metric, "verdict", "mark"), rows, words=("verdict", "mark"), main=main
        ),
        tuple(filter(None, [_recommendation(best)])),
    )


def _recommendation(best: Generalisation) -> str:
    if best.recommended_step is None:
        return ""
    at, path, reason = step(best.recommended_step), best.recommended_path, best.reason.rstrip(".")
    chosen = f"Use the checkpoint of step {at} ({path})" if path else f"Step {at} was best"
    gain = (
        f" It gains {number(best.expected_gain)} over the last." if best.expected_gain > 0 else ""
    )
    return f"{chosen}. {reason}.{gain}"


def _serving(report: Report) -> Section:
    """As far as `prove` was asked."""
    proofs = report.serving
    if not proofs:
        return Section("serving", "Served loss")
    rows = [
        (
            one.step,
            one.val_loss,
            one.served_loss,
            one.served_loss - one.val_loss,
            one.tolerance,
            "equal" if one.is_equal else "REFUSED",
            one.engine,
            "; ".join(one.causes),
        )
        for one in proofs
    ]
    header = ("step", "val/loss", "served", "apart", "tolerance", "result", "engine", "why")
    return Section(
        "serving",
        "Served loss",
        f"In {sum(one.is_equal for one in proofs)} of {len(proofs)} proofs an export serves the "
        "loss its step was validated with.",
        table_of(header, rows, words=("result", "engine", "why")),
    )


def _evaluations(report: Report) -> Section:
    """What checkpoints achieve beside the loss they were validated with."""
    found, best = report.evaluations, report.generalisation
    if not found:
        return Section("evaluations", "Evaluations")
    steps = sorted({at for results in found.values() for at in results})
    rows = [
        (
            at,
            best.values.get(at) if best else None,
            *(_with_bounds(results.get(at)) for results in found.values()),
        )
        for at in steps
    ]
    header = ("step", best.metric if best else "validation", *found)
    return Section(
        "evaluations",
        "Evaluations",
        "Means, with 95 % intervals: checkpoints whose intervals overlap may be equally good.",
        table_of(header, rows),
    )


def _with_bounds(result: Mapping[str, Any] | None) -> str:
    """An evaluation's mean, and its interval where that is known."""
    if result is None:
        return MISSING
    has_bounds = all(isinstance(result.get(side), int | float) for side in ("low", "high"))
    return number(result["mean"]) + (
        f" [{number(result['low'])}, {number(result['high'])}]" if has_bounds else ""
    )


def _learning_rate(report: Report) -> Section:
    rate = report.learning_rate
    if rate is None:
        return Section("learning-rate", "Learning rate")
    raised = [
        f"Raised {number(one.factor)} times, to {number(one.peak)}, at {interval(one.steps)}"
        f"{'' if one.is_over else ', to the end'}."
        for one in rate.raised
    ]
    fell = told(share(rate.anomalies_at_high_share), "{} of the anomalies fell into that time.")
    return Section(
        "learning-rate",
        "Learning rate",
        f"{capitalised(rate.schedule)} schedule, peak {number(rate.peak)} after "
        f"{step(rate.warmup_steps)} warm-up steps, last {number(rate.last)}; at 0.8 of the peak or "
        f"more for {share(rate.high_share)} of the run.",
        notes=tuple(filter(None, [*raised, fell])),
    )


def _throughput(report: Report) -> Section:
    speed = report.throughput
    if speed is None:
        return Section("throughput", "Speed and memory")
    shares = sorted(speed.shares.items(), key=lambda item: item[1], reverse=True)
    rows = [(phase, share(part), part * speed.step_s) for phase, part in shares]
    known = [
        told(speed.tokens_per_s, "tokens per second {}"),
        told(share(speed.mfu), "MFU {}"),
        told(share(speed.goodput), "goodput {}"),
    ]
    note = capitalised("; ".join(filter(None, known)))
    return Section(
        "throughput",
        "Speed and memory",
        f"A step takes {number(speed.step_s)} s. {speed.bottleneck}",
        table_of(("phase", "share", "seconds"), rows, words=["phase"], main=rows[:NUM_MAIN_PHASES]),
        (f"{note}.",) if note else (),
    )


def _checklist(report: Report) -> Section:
    if not report.checklist:
        return Section("checklist", "Checklist")
    counts = Counter(item.status for item in report.checklist)
    told_counts = ", ".join(
        f"{counts[status]} {status}" for status in ("pass", "unknown", "note", "fail")
    )
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))

    def row(item: CheckItem) -> tuple[str, ...]:
        return (item.status, item.phase, item.text, item.detail)

    table = table_of(
        ("status", "phase", "check", "detail"),
        map(row, items),
        words=("status", "phase", "check", "detail"),
        details=["phase"],
        main=[row(item) for item in items if item.status in ("fail", "note")],
    )
    return Section("checklist", "Checklist", f"{told_counts}.", table)


def _metrics(report: Report) -> Section:
    if not report.metrics:
        return Section("metrics", "Metrics")

    def row(one: MetricSummary) -> tuple[object, ...]:
        return (
            one.key + (f" [{one.unit}]" if one.unit else ""),
            one.group,
            one.first,
            one.last,
            _at(one.minimum, one.minimum_step),
            _at(one.maximum, one.maximum_step),
            one.median,
            one.trend,
            one.direction,
            f"{one.meaning} {one.observation}".strip(),
        )

    by_role = sorted(report.metrics, key=lambda metric: role_order(metric.key))
    table = table_of(
        ("metric", "group", "first", "last", "min", "max", "median", "trend", "better", "meaning"),
        map(row, report.metrics),
        words=("metric", "group", "trend", "better", "meaning"),
        details=("group", "min", "median", "better", "meaning"),
        main=map(row, by_role[:NUM_MAIN_METRICS]),
    )
    return Section("metrics", "Metrics", f"{len(report.metrics)} were logged.", table)


def _trends(report: Report) -> Section:
    if not report.trends:
        return Section("trends", "Trends")
    rows = [
        (one.key, one.early, one.middle, one.late, one.slope_per_step, one.p_value)
        for one in report.trends
    ]
    return Section(
        "trends",
        "Trends",
        "Means of the thirds of the run; slope by Theil-Sen, p by Mann-Kendall.",
        table_of(
            ("metric", "early", "middle", "late", "slope per step", "p"), rows, words=["metric"]
        ),
        tuple(
            f"{one.key}, last means: {', '.join(map(number, one.last_means))}."
            for one in report.trends
            if one.last_means
        ),
    )


def _limits(report: Report) -> Section:
    limits, overridden = report.thresholds, report.overridden
    if not limits:
        return Section("limits", "Limits")
    rows = [(name, limit, "yes" if name in overridden else "") for name, limit in limits.items()]
    return Section(
        "limits",
        "Limits",
        f"{len(limits)} in use, {len(overridden)} overridden; {len(report.insufficient)} rules not "
        f"judged.",
        table_of(("limit", "value", "overridden"), rows, words=("limit", "overridden")),
        tuple(f"{rule} was not judged: {reason}." for rule, reason in report.insufficient),
    )


ALWAYS = "train/loss"
MIN_SCORE = 6.0
MAX_METRICS, MAX_ROWS = 6, 200


def around(log: RunLog, *, at: int, window: int) -> Section:
    """Rows from step `at - window` to `at + window`; what moved most comes first, the loss
    always.
    """
    ends = at - window, at + window
    title = f"{log.path}, steps {step(ends[0])} to {step(ends[1])}"
    scores = {key: _score(series, *ends) for key, series in log.series.items()}
    moved = sorted((key for key in scores if scores[key] > MIN_SCORE), key=lambda key: -scores[key])
    keys = [key for key in dict.fromkeys([ALWAYS, *moved]) if key in log.series][:MAX_METRICS]
    values = {key: within(log.series[key], *ends).by_step() for key in keys}
    steps = sorted(set().union(*values.values()))
    if not steps:
        return Section("around", title, "No rows there.")
    lead = f"{len(moved)} of {len(log.series)} metrics left their usual range here, the {len(values)} shown first."
    left = len(steps[MAX_ROWS:])
    return Section(
        "around",
        title,
        lead,
        table_of(
            ("step", *keys),
            [(one, *(values[key].get(one) for key in keys)) for one in steps[:MAX_ROWS]],
        ),
        (f"{left} later rows are left out: choose a smaller window.",) if left else (),
    )


def _score(series: Series, first: int, last: int) -> float:
    """How far the window goes from the median of the whole series, in robust standard
    deviations.
    """
    near, known = finite(within(series, first, last)).values, finite(series).values
    if not len(near):
        return 0.0
    centre = float(np.median(known))
    usual, distance = float(spread(known - centre)), float(np.abs(near - centre).max())
    return distance / usual if usual else math.inf if distance else 0.0
