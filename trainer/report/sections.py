"""The sections of a report, which the page and the terminal show in the same order."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.formatting import (
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
from trainer.report.result import Finding, Generalisation, Report

STATUSES = ("fail", "note", "unknown", "pass")
MAX_ANOMALIES, MAX_PHASES, MAX_METRICS = 5, 4, 8
"""Rows of a table in the terminal."""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; a terminal shows the first `num_main` rows and `num_columns`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_main: int
    num_columns: int

    def is_number(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned right."""
        return all(row[column][:1] in "0123456789-+–" for row in self.rows)


@dataclass(frozen=True)
class Section:
    """A heading, one sentence, findings, a table, and notes on it."""

    id: str
    title: str
    lead: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.lead or self.table or self.notes or self.findings)


def table_of(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    num_main: int | None = None,
    num_columns: int | None = None,
) -> Table | None:
    """Make a table of values, written by their types; None without rows."""
    cells = tuple(tuple(map(shown, row)) for row in rows)
    if not cells:
        return None
    num_main = len(cells) if num_main is None else num_main
    return Table(tuple(header), cells, num_main, num_columns or len(header))


def sections(report: Report) -> tuple[Section, ...]:
    """Return the sections that have something to say: what matters, what next, then details."""
    others = tuple(finding for finding in report.findings if finding not in report.top)
    found = (
        Section("top", "What matters", findings=report.top),
        Section("next", "What next", report.closing),
        Section("findings", "Also found", findings=others),
        _validation(report),
        _anomalies(report),
        _serving(report),
        _evaluations(report),
        _learning_rate(report),
        _throughput(report),
        _checklist(report),
        _metrics(report),
        _limits(report),
    )
    return tuple(section for section in found if not section.is_empty)


def _at(value: float, at: int) -> str:
    return f"{number(value)} @ {step(at)}"


def _anomalies(report: Report) -> Section:
    title, anomalies = "Anomalies", report.anomalies
    if not anomalies:
        return Section("anomalies", title)
    rows = [
        (
            interval(one.steps).split(" ", 1)[1],
            one.metric,
            _at(one.peak_value, one.peak_step),
            told(one.ratio, "{}×") or None,
            "yes" if one.has_recovered else "no",
            percent(one.percent),
            one.z,
            companions(one) or None,
        )
        for one in anomalies
    ]
    chains = Counter(" → ".join(one.chain) for one in anomalies if len(one.chain) > 1)
    orders = (
        f"Order of onset in {times} of {len(anomalies)}: {chain}."
        for chain, times in chains.most_common(3)
    )
    header = "steps", "metric", "peak", "to usual", "recovered", "place", "z", "together with"
    return Section(
        "anomalies",
        title,
        f"{counted(len(anomalies), 'interval')} in which metrics left their usual range.",
        table_of(header, rows, num_main=MAX_ANOMALIES, num_columns=5),
        tuple(orders),
    )


def _validation(report: Report) -> Section:
    title, best = "Generalisation", report.generalisation
    if best is None:
        return Section("validation", title)
    side = "above" if best.gap >= 0 else "below"
    gap = told(abs(best.gap), f"; validation is {{}} {side} training at the end")
    marks = {
        "best": best.best_step,
        "recommended": best.recommended_step,
        "overfits from here": best.overfit_step,
    }
    rows = [
        (at, best.values[at], verdict, ", ".join(mark for mark in marks if marks[mark] == at))
        for at, verdict in sorted(best.verdicts.items())
    ]
    return Section(
        "validation",
        title,
        f"{capitalised(best.metric)}: best {number(best.best_value)} at step "
        f"{step(best.best_step)}, last {number(best.last_value)}{gap}.",
        table_of(("step", best.metric, "verdict", "mark"), rows, num_main=0),
        _recommendation(best),
    )


def _recommendation(best: Generalisation) -> tuple[str, ...]:
    if best.recommended_step is None:
        return ()
    at, path = step(best.recommended_step), best.recommended_path
    chosen = f"Use the checkpoint of step {at} ({path})" if path else f"Step {at} was best"
    is_gain = best.expected_gain > 0
    gain = f" It gains {number(best.expected_gain)} over the last." if is_gain else ""
    return (f"{chosen}. {best.reason.rstrip('.')}.{gain}",)


def _serving(report: Report) -> Section:
    title, proofs = "Served loss", report.serving
    if not proofs:
        return Section("serving", title)
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
        title,
        f"In {sum(one.is_equal for one in proofs)} of {len(proofs)} proofs an export serves the "
        "loss its step was validated with.",
        table_of(header, rows),
    )


def _evaluations(report: Report) -> Section:
    title, found, best = "Evaluations", report.evaluations, report.generalisation
    steps = sorted({at for results in found.values() for at in results})
    if not steps:
        return Section("evaluations", title)
    validated = best.values if best else {}
    rows = [
        (at, validated.get(at), *(_with_bounds(results.get(at)) for results in found.values()))
        for at in steps
    ]
    return Section(
        "evaluations",
        title,
        "Means, with 95 % intervals: checkpoints whose intervals overlap may be equally good.",
        table_of(("step", best.metric if best else "validation", *found), rows),
    )


def _with_bounds(result: Mapping[str, Any] | None) -> str:
    """Return an evaluation's mean, with its interval where that is known."""
    if result is None:
        return MISSING
    low, high = result.get("low"), result.get("high")
    has_bounds = isinstance(low, int | float) and isinstance(high, int | float)
    return number(result["mean"]) + (f" [{number(low)}, {number(high)}]" if has_bounds else "")


def _learning_rate(report: Report) -> Section:
    title, rate = "Learning rate", report.learning_rate
    if rate is None:
        return Section("learning-rate", title)
    raised = (
        f"Raised {number(one.factor)} times, to {number(one.peak)}, at {interval(one.steps)}"
        f"{'' if one.is_over else ', to the end'}."
        for one in rate.raised
    )
    fell = told(share(rate.anomalies_at_high_share), "{} of the anomalies fell into that time.")
    return Section(
        "learning-rate",
        title,
        f"{capitalised(rate.schedule)} schedule, peak {number(rate.peak)} after "
        f"{step(rate.warmup_steps)} warm-up steps, last {number(rate.last)}; at 0.8 of the peak or "
        f"more for {share(rate.high_share)} of the run.",
        notes=tuple(filter(None, [*raised, fell])),
    )


def _throughput(report: Report) -> Section:
    title, speed = "Speed and memory", report.throughput
    if speed is None:
        return Section("throughput", title)
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
        title,
        f"A step takes {number(speed.step_s)} s. {speed.bottleneck}",
        table_of(("phase", "share", "seconds"), rows, num_main=MAX_PHASES),
        (f"{note}.",) if note else (),
    )


def _checklist(report: Report) -> Section:
    title, items = "Checklist", report.checklist
    counts = Counter(item.status for item in items)
    rows = [
        (item.status, item.text, item.detail, item.phase)
        for item in sorted(items, key=lambda item: STATUSES.index(item.status))
    ]
    table = table_of(
        ("status", "check", "detail", "phase"),
        rows,
        num_main=counts["fail"] + counts["note"],
        num_columns=3,
    )
    lead = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES))
    return Section("checklist", title, f"{lead}." if items else "", table)


def _metrics(report: Report) -> Section:
    title, metrics = "Metrics", report.metrics
    rows = [
        (
            one.key + (f" [{one.unit}]" if one.unit else ""),
            one.first,
            one.last,
            _at(one.maximum, one.maximum_step),
            one.trend,
            _at(one.minimum, one.minimum_step),
            one.median,
            one.direction,
            f"{one.observation} {one.meaning}",
        )
        for one in metrics
    ]
    header = "metric", "first", "last", "max", "trend", "min", "median", "better", "meaning"
    table = table_of(header, rows, num_main=MAX_METRICS, num_columns=5)
    return Section("metrics", title, f"{len(metrics)} were logged." if metrics else "", table)


def _limits(report: Report) -> Section:
    title, limits, overridden = "Limits", report.thresholds, report.overridden
    rows = [(name, limit, "yes" if name in overridden else "") for name, limit in limits.items()]
    num_unjudged = len(report.insufficient)
    counts = f"{len(limits)} in use, {len(overridden)} overridden; {num_unjudged} rules not judged."
    return Section(
        "limits",
        title,
        counts if limits else "",
        table_of(("limit", "value", "overridden"), rows, num_main=0),
        tuple(f"{rule} was not judged: {reason}." for rule, reason in report.insufficient),
    )
