"""The sections of a report, of which page and terminal show nothing else, and the rows around one step."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer.detection.window import spread
from trainer.report.formatting import ARROWS, MISSING, capitalised, companions, interval, number, percent, share, step
from trainer.report.result import Anomaly, Finding, Report, Throughput
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import finite, within
from trainer.report.vocabulary import role_order

MAX_CHAINS = 3
STATUSES = ("fail", "note", "unknown", "pass")

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; `words` names the columns that hold text and may wrap, the others hold numbers.

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


def sections(report: Report) -> tuple[Section, ...]:
    """In the order in which they are read; those that have nothing to say may still have plots."""
    others = tuple(finding for finding in report.findings if finding not in report.top)
    return (
        Section("top", "What matters", findings=report.top),
        Section("loss", "Loss"),
        Section("findings", "Also found", findings=others),
        _anomalies(report),
        _validation(report),
        _serving(report),
        *_evaluations(report),
        _learning_rate(report),
        _throughput(report.throughput),
        _checklist(report),
        Section("curves", "All curves"),
        _metrics(report),
        _trends(report),
        _limits(report),
        Section("next", "What next", report.closing),
    )


def table(header: str, rows: Sequence[Row], *, words: str, details: str = "", main: Sequence[Row] = ()) -> Table | None:
    """Columns are named in lists with commas: short to write, easy to compare with the rows. None without rows."""
    named, left_out = (frozenset(names.split(", ")) for names in (words, details))
    return Table(tuple(header.split(", ")), tuple(rows), named, left_out, tuple(main)) if rows else None


def _anomalies(report: Report) -> Section:
    rows = [
        (
            interval(a.steps).split(" ", 1)[1],
            percent(a.percent),
            a.metric,
            f"{number(a.peak_value)} @ {step(a.peak_step)}",
            number(a.z),
            number(a.ratio) if number(a.ratio) == MISSING else f"{number(a.ratio)}×",
            "yes" if a.has_recovered else "no",
            companions(a) or MISSING,
        )
        for a in report.anomalies
    ]
    header = "steps, place, metric, peak, z, to usual, recovered, together with"
    shown = table(header, rows, words="metric, together with", details="z, together with", main=rows[:5])
    count = len(rows)
    lead = f"{count} interval{'s' * (count > 1)} in which metrics left their usual range." if rows else ""
    chains = Counter(" → ".join(a.chain) for a in report.anomalies if len(a.chain) > 1)
    together = _moved_with(report.anomalies)
    notes = [f"Moved with them: {together}."] if together else []
    notes += [f"Order of onset in {times} of {count}: {chain}." for chain, times in chains.most_common(MAX_CHAINS)]
    notes += [f"{a} and {b} move together (rho {number(rho)})." for a, b, rho in report.correlations]
    return Section("anomalies", "Anomalies", lead, shown, tuple(notes) if rows else ())


def _moved_with(anomalies: Sequence[Anomaly]) -> str:
    others = (mover for anomaly in anomalies for mover in anomaly.movers if mover.metric != anomaly.metric)
    counts = Counter(f"{mover.metric} {ARROWS[mover.sign]}" for mover in others)
    return ", ".join(f"{name} in {count}" for name, count in counts.most_common())


def _validation(report: Report) -> Section:
    section = Section("validation", "Generalisation")
    if (found := report.generalisation) is None:
        return section
    marked = {"best": found.best_step, "recommended": found.recommended_step, "overfits from here": found.overfit_step}
    rows = [
        (step(at), number(found.values[at]), verdict, ", ".join(mark for mark, place in marked.items() if place == at))
        for at, verdict in sorted(found.verdicts.items())
    ]
    main = [row for row in rows if row[-1] or row is rows[-1]]
    shown = table(f"step, {found.metric}, verdict, mark", rows, words="verdict, mark", main=main)
    side = f"{number(abs(found.gap))} {'above' if found.gap >= 0 else 'below'}"
    gap = "" if math.isnan(found.gap) else f"; validation is {side} training at the end"
    best = f"{number(found.best_value)} at step {step(found.best_step)}"
    lead = f"{found.metric}: best {best}, last {number(found.last_value)}{gap}."
    notes: tuple[str, ...] = ()
    if found.recommended_step is not None:
        at = step(found.recommended_step)
        use = f"Use the checkpoint of step {at} ({found.recommended_path})"
        gain = f" It gains {number(found.expected_gain)} over the last." if found.expected_gain > 0 else ""
        notes = (f"{use if found.recommended_path else f'Step {at} was best'}. {found.reason.rstrip('.')}.{gain}",)
    return replace(section, lead=capitalised(lead), table=shown, notes=notes)


def _serving(report: Report) -> Section:
    """As far as `prove` was asked."""
    rows = [
        (
            step(proof.step),
            number(proof.val_loss),
            number(proof.served_loss),
            number(proof.served_loss - proof.val_loss),
            number(proof.tolerance),
            "equal" if proof.is_equal else "REFUSED",
            proof.engine,
            "; ".join(proof.causes),
        )
        for proof in report.serving
    ]
    shown = table("step, val/loss, served, apart, tolerance, result, engine, why", rows, words="result, engine, why")
    equal = sum(proof.is_equal for proof in report.serving)
    lead = f"In {equal} of {len(rows)} proofs an export serves the loss its step was validated with." if rows else ""
    return Section("serving", "Served loss", lead, shown)


def _evaluations(report: Report) -> Iterator[Section]:
    """What checkpoints achieve beside the loss they were validated with; only where something was evaluated."""
    names, found = list(report.evaluations), report.generalisation
    if not names:
        return
    losses = found.values if found is not None else {}
    rows: list[Row] = []
    for at in sorted({at for results in report.evaluations.values() for at in results}):
        cells = (_result(report.evaluations[name].get(at)) for name in names)
        rows.append((step(at), number(losses[at]) if at in losses else MISSING, *cells))
    metric = "validation" if found is None else found.metric
    lead = "Means, with 95 % intervals: checkpoints whose intervals overlap may be equally good."
    yield Section("evaluations", "Evaluations", lead, table(f"step, {metric}, {', '.join(names)}", rows, words=""))


def _result(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return MISSING
    has_bounds = all(isinstance(row.get(side), int | float) for side in ("low", "high"))
    return number(row["mean"]) + (f" [{number(row['low'])}, {number(row['high'])}]" if has_bounds else "")


def _learning_rate(report: Report) -> Section:
    section = Section("learning-rate", "Learning rate")
    if (found := report.learning_rate) is None:
        return section
    lead = (
        f"{found.schedule} schedule, peak {number(found.peak)} after {step(found.warmup_steps)} warm-up steps, "
        f"last {number(found.last)}; at 0.8 of the peak or more for {share(found.high_share)} of the run."
    )
    notes = [
        f"Raised {number(raised.factor)} times, to {number(raised.peak)}, at {interval(raised.steps)}"
        f"{'' if raised.is_over else ', to the end'}."
        for raised in found.raised
    ]
    if found.anomalies_at_high_share is not None:
        notes.append(f"{share(found.anomalies_at_high_share)} of the anomalies fell into that time.")
    return replace(section, lead=capitalised(lead), notes=tuple(notes))


def _throughput(found: Throughput | None) -> Section:
    section = Section("throughput", "Speed and memory")
    if found is None:
        return section
    phases = sorted(found.shares.items(), key=lambda item: -item[1])
    rows = [(phase, share(part), number(part * found.step_s)) for phase, part in phases]
    facts = {
        "tokens per second": number(found.tokens_per_s),
        "MFU": share(found.mfu),
        "step time grew by": MISSING if found.drift_percent is None else percent(found.drift_percent),
        "memory grows by": f"{number(found.leak_gib_per_1000_steps)} GiB per 1000 steps",
        "goodput": share(found.goodput),
    }
    known = "; ".join(f"{name} {value}" for name, value in facts.items() if MISSING not in value)
    lead = f"A step takes {number(found.step_s)} s. {found.bottleneck}"
    shown = table("phase, share, seconds", rows, words="phase", main=rows[:4])
    return replace(section, lead=lead, table=shown, notes=(f"{capitalised(known)}.",) if known else ())


def _checklist(report: Report) -> Section:
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))
    rows = [(item.status, item.phase, item.text, item.detail) for item in items]
    counts = Counter(item.status for item in items)
    lead = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES)) + "." if items else ""
    columns = "status, phase, check, detail"
    told = [row for row in rows if row[0] in ("fail", "note")]
    return Section("checklist", "Checklist", lead, table(columns, rows, words=columns, details="phase", main=told))


def _metrics(report: Report) -> Section:
    rows = {
        m.key: (
            f"{m.key} [{m.unit}]" if m.unit else m.key,
            m.group,
            number(m.first),
            number(m.last),
            f"{number(m.minimum)} @ {step(m.minimum_step)}",
            f"{number(m.maximum)} @ {step(m.maximum_step)}",
            number(m.median),
            m.trend,
            m.direction,
            " ".join(part for part in (m.meaning, m.observation) if part),
        )
        for m in report.metrics
    }
    shown = table(
        "metric, group, first, last, min, max, median, trend, better, meaning",
        tuple(rows.values()),
        words="metric, group, trend, better, meaning",
        details="group, min, median, better, meaning",
        main=[rows[key] for key in sorted(rows, key=role_order)[:8]],
    )
    return Section("metrics", "Metrics", f"{len(rows)} were logged." if rows else "", shown)


def _trends(report: Report) -> Section:
    rows = [
        (t.key, number(t.early), number(t.middle), number(t.late), number(t.slope_per_step), number(t.p_value))
        for t in report.trends
    ]
    lead = "Means of the thirds of the run; slope by Theil-Sen, p by Mann-Kendall." if rows else ""
    shown = table("metric, early, middle, late, slope per step, p", rows, words="metric")
    lasts = {t.key: ", ".join(map(number, t.last_means)) for t in report.trends if t.last_means}
    return Section("trends", "Trends", lead, shown, tuple(f"{key}, last means: {last}." for key, last in lasts.items()))


def _limits(report: Report) -> Section:
    if not report.thresholds and not report.insufficient:
        return Section("limits", "Limits")
    rows = [(key, number(value), "yes" if key in report.overridden else "") for key, value in report.thresholds.items()]
    lead = f"{len(rows)} in use, {len(report.overridden)} overridden; {len(report.insufficient)} rules not judged."
    notes = tuple(f"{rule} was not judged: {reason}." for rule, reason in report.insufficient)
    return Section("limits", "Limits", lead, table("limit, value, overridden", rows, words="limit, overridden"), notes)


ALWAYS = "train/loss"
MIN_SCORE = 6.0
MAX_METRICS, MAX_ROWS = 6, 200


def around(log: RunLog, *, at: int, window: int) -> Section:
    """Rows from step `at - window` to `at + window`; what moved most comes first, the loss always."""
    first, last = at - window, at + window
    title = f"{log.path}, steps {step(first)} to {step(last)}"
    scores = {key: _score(series, first, last) for key, series in log.series.items()}
    moved = sorted((key for key in scores if scores[key] > MIN_SCORE), key=lambda key: -scores[key])
    keys = [key for key in dict.fromkeys([ALWAYS, *moved]) if key in log.series][:MAX_METRICS]
    columns = [within(log.series[key], first, last).by_step() for key in keys]
    steps = sorted(set().union(*columns))
    if not steps:
        return Section("around", title, "No rows there.")
    rows = tuple((step(at), *(number(column.get(at)) for column in columns)) for at in steps[:MAX_ROWS])
    lead = f"{len(moved)} of {len(log.series)} metrics left their usual range here, the {len(keys)} shown first."
    left = len(steps) - len(rows)
    notes = (f"{left} later rows are left out: choose a smaller window.",) if left else ()
    return Section("around", title, lead, Table(("step", *keys), rows), notes)


def _score(series: Series, first: int, last: int) -> float:
    """How far the window goes from the median of the whole series, in robust standard deviations."""
    near, known = finite(within(series, first, last)).values, finite(series).values
    if not len(near):
        return 0.0
    centre = float(np.median(known))
    usual, distance = float(spread(known - centre)), float(np.abs(near - centre).max())
    return distance / usual if usual else math.inf if distance else 0.0
