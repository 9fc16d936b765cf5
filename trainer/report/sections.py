"""The sections of a report, which the page and the terminal show in the same order."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.report.formatting import (
    MISSING,
    capitalised,
    counted,
    interval,
    number,
    share,
    shown,
    step,
    told,
)
from trainer.report.result import Finding, Generalisation, LearningRate, Report, Throughput

MAX_MAIN_ROWS = 8
"""Rows of a table in the terminal."""
STATUSES = ("fail", "note", "unknown", "pass")


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
    num_main: int = MAX_MAIN_ROWS,
    num_columns: int | None = None,
) -> Table | None:
    """Make a table of values, written by their types; None without rows."""
    cells = tuple(tuple(map(_cell, row)) for row in rows)
    return Table(tuple(header), cells, num_main, num_columns or len(header)) if cells else None


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "; ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)


def _attributes(
    items: Iterable[object], names: str, num_columns: int | None = None
) -> Table | None:
    """Make a table with an item a row and the named attributes as columns."""
    columns = names.split()
    rows = [[getattr(item, name) for name in columns] for item in items]
    header = [name.replace("_", " ") for name in columns]
    return table_of(header, rows, num_columns=num_columns)


def sections(report: Report) -> tuple[Section, ...]:
    """Return the sections that have something to say: what matters, what next, then details."""
    others = tuple(finding for finding in report.findings if finding not in report.top)
    found = (
        Section("top", "What matters", findings=report.top),
        Section("next", "What next", report.closing.removeprefix("Next: ")),
        Section("findings", "Also found", findings=others),
        _validation(report.generalisation) if report.generalisation else None,
        _anomalies(report) if report.anomalies else None,
        _serving(report) if report.serving else None,
        _evaluations(report) if report.evaluations else None,
        _learning_rate(report.learning_rate) if report.learning_rate else None,
        _throughput(report.throughput) if report.throughput else None,
        _checklist(report) if report.checklist else None,
        _metrics(report) if report.metrics else None,
        _limits(report) if report.thresholds else None,
    )
    return tuple(section for section in found if section and not section.is_empty)


def _validation(best: Generalisation) -> Section:
    side = "above" if best.gap >= 0 else "below"
    gap = told(abs(best.gap), f"; validation is {{}} {side} training at the end")
    lead = (
        f"{capitalised(best.metric)}: best {number(best.best_value)} at step "
        f"{step(best.best_step)}, last {number(best.last_value)}{gap}."
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
    notes = []
    if best.recommended_step is not None:
        at, path = step(best.recommended_step), best.recommended_path
        chosen = f"Use the checkpoint of step {at} ({path})" if path else f"Step {at} was best"
        gain = (
            f" It gains {number(best.expected_gain)} over the last." if best.expected_gain else ""
        )
        notes.append(f"{chosen}. {best.reason.rstrip('.')}.{gain}")
    table = table_of(("step", best.metric, "verdict", "mark"), rows, num_main=0)
    return Section("validation", "Generalisation", lead, table, tuple(notes))


def _anomalies(report: Report) -> Section:
    anomalies = report.anomalies
    rows = [
        (
            interval(one.steps).split(" ", 1)[1],
            one.metric,
            f"{number(one.peak_value)} @ {step(one.peak_step)}",
            told(one.ratio, "{}×") or None,
            one.has_recovered,
            one.z,
            tuple(f"{mover.metric} {number(mover.peak_value)}" for mover in one.movers),
        )
        for one in anomalies
    ]
    header = ("steps", "metric", "peak", "to usual", "recovered", "z", "moved")
    chains = Counter(" → ".join(one.chain) for one in anomalies if len(one.chain) > 1)
    orders = [f"{times} of {len(anomalies)}: {chain}" for chain, times in chains.most_common(3)]
    return Section(
        "anomalies",
        "Anomalies",
        f"{counted(len(anomalies), 'interval')} in which metrics left their usual range.",
        table_of(header, rows, num_columns=5),
        tuple(f"Order of onset in {order}." for order in orders),
    )


def _serving(report: Report) -> Section:
    num_equal, num_proofs = sum(one.is_equal for one in report.serving), len(report.serving)
    lead = (
        f"In {num_equal} of {num_proofs} proofs an export serves the loss its step was validated "
        "with."
    )
    names = "step engine val_loss served_loss tolerance is_equal causes"
    return Section("serving", "Served loss", lead, _attributes(report.serving, names))


def _evaluations(report: Report) -> Section:
    rows = [
        (name, at, result["mean"], *(result.get(side, MISSING) for side in ("low", "high")))
        for name, results in report.evaluations.items()
        for at, result in results.items()
    ]
    lead = "Means, with 95 % intervals: checkpoints whose intervals overlap may be equally good."
    table = table_of(("evaluation", "step", "mean", "low", "high"), rows)
    return Section("evaluations", "Evaluations", lead, table)


def _learning_rate(rate: LearningRate) -> Section:
    raised = [
        f"Raised {number(one.factor)} times, to {number(one.peak)}, at {interval(one.steps)}"
        f"{'' if one.is_over else ', to the end'}."
        for one in rate.raised
    ]
    fell = told(share(rate.anomalies_at_high_share), "{} of the anomalies fell into that time.")
    lead = (
        f"{capitalised(rate.schedule)} schedule, peak {number(rate.peak)} after "
        f"{step(rate.warmup_steps)} warm-up steps, last {number(rate.last)}; at 0.8 of the peak or "
        f"more for {share(rate.high_share)} of the run."
    )
    return Section("learning-rate", "Learning rate", lead, notes=(*raised, *filter(None, [fell])))


def _throughput(speed: Throughput) -> Section:
    shares = sorted(speed.shares.items(), key=lambda item: item[1], reverse=True)
    rows = [(phase, share(part), part * speed.step_s) for phase, part in shares]
    known = (
        told(speed.tokens_per_s, "{} tokens per second."),
        told(share(speed.mfu), "MFU {}."),
        told(share(speed.goodput), "Goodput {}."),
    )
    step_time = f"A step takes {number(speed.step_s)} s."
    lead = " ".join(filter(None, (step_time, speed.bottleneck, *known)))
    return Section(
        "throughput", "Speed and memory", lead, table_of(("phase", "share", "seconds"), rows)
    )


def _checklist(report: Report) -> Section:
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))
    counts = Counter(item.status for item in items)
    lead = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES))
    table = _attributes(items, "status text detail phase", num_columns=3)
    return Section("checklist", "Checklist", f"{lead}.", table)


def _metrics(report: Report) -> Section:
    names = (
        "key first last minimum maximum trend minimum_step maximum_step median unit direction "
        "observation meaning"
    )
    table = _attributes(report.metrics, names, num_columns=6)
    return Section("metrics", "Metrics", f"{len(report.metrics)} were logged.", table)


def _limits(report: Report) -> Section:
    limits, overridden = report.thresholds, report.overridden
    rows = [(name, limit, name in overridden) for name, limit in limits.items()]
    unjudged = report.insufficient
    lead = f"{len(limits)} in use, {len(overridden)} overridden; {len(unjudged)} rules were not judged."
    table = table_of(("limit", "value", "overridden"), rows, num_main=0)
    notes = (f"{rule} was not judged: {reason}." for rule, reason in unjudged)
    return Section("limits", "Limits", lead, table, tuple(notes))
