"""The sections of a report as tables of finished strings, so that text and page cannot show different numbers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.formatting import ARROWS, MISSING, clean, companions, interval, number, percent, share, step
from trainer.report.result import Anomaly, Report, Throughput
from trainer.report.run_log import RunLog

GROUPS = ("optimisation", "validation", "reward", "length", "state", "timing", "memory", "data", "other")
MAX_CHAINS = 3
STATUSES = ("fail", "note", "unknown", "pass")


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; `words` names the columns that hold text and may wrap, the others hold numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str]


@dataclass(frozen=True)
class Section:
    """`lead` says it in one sentence; `notes` follow the table."""

    id: str
    title: str
    lead: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()


def sections(report: Report, log: RunLog) -> tuple[Section, ...]:
    """Those that have something to say, in the order in which they are read."""
    found = (
        _anomalies(report),
        _validation(report),
        _learning_rate(report),
        _throughput(report.throughput),
        _checklist(report),
        _metrics(report),
        _trends(report),
        _appendix(report),
    )
    return tuple(section for section in found if section is not None)


def table(header: str, rows: Sequence[tuple[str, ...]], *, words: str) -> Table:
    """`header` and `words` are lists with commas: short to write, easy to compare with the rows below."""
    return Table(tuple(header.split(", ")), tuple(rows), frozenset(words.split(", ")))


def _anomalies(report: Report) -> Section | None:
    if not report.anomalies:
        return None
    rows = [
        (
            interval(a.steps).split(" ", 1)[1],
            percent(a.percent),
            clean(a.metric),
            f"{number(a.peak_value)} @ {step(a.peak_step)}",
            number(a.z),
            number(a.ratio) if number(a.ratio) == MISSING else f"{number(a.ratio)}×",
            "yes" if a.has_recovered else "no",
            companions(a) or MISSING,
        )
        for a in report.anomalies
    ]
    count = len(report.anomalies)
    lead = f"{count} interval{'s' * (count > 1)} in which metrics left their usual range."
    chains = Counter(" → ".join(map(clean, a.chain)) for a in report.anomalies if len(a.chain) > 1)
    together = _moved_with(report.anomalies)
    notes = [f"Moved with them: {together}."] if together else []
    notes += [f"Order of onset in {times} of {count}: {chain}." for chain, times in chains.most_common(MAX_CHAINS)]
    notes += [f"{clean(a)} and {clean(b)} move together (rho {number(rho)})." for a, b, rho in report.correlations]
    header = "steps, place, metric, peak, z, to usual, recovered, together with"
    words = "metric, together with"
    return Section("anomalies", "Anomalies", lead, table(header, rows, words=words), tuple(notes))


def _moved_with(anomalies: Sequence[Anomaly]) -> str:
    others = (mover for anomaly in anomalies for mover in anomaly.movers if mover.metric != anomaly.metric)
    counts = Counter(f"{clean(mover.metric)} {ARROWS[mover.sign]}" for mover in others)
    return ", ".join(f"{name} in {count}" for name, count in counts.most_common())


def _validation(report: Report) -> Section | None:
    found = report.generalisation
    if found is None:
        return None
    marked = {"best": found.best_step, "recommended": found.recommended_step, "overfits from here": found.overfit_step}
    rows = [
        (step(at), number(found.values[at]), verdict, ", ".join(mark for mark, place in marked.items() if place == at))
        for at, verdict in sorted(found.verdicts.items())
    ]
    above = "" if math.isnan(found.gap) else f"; validation is {number(found.gap)} above training at the end"
    best = f"{number(found.best_value)} at step {step(found.best_step)}"
    lead = f"{clean(found.metric)}: best {best}, last {number(found.last_value)}{above}."
    notes = []
    if found.recommended_step is not None:
        at = step(found.recommended_step)
        where = f"Use the checkpoint of step {at} ({clean(str(found.recommended_path))})"
        lead_in = where if found.recommended_path else f"Step {at} was best"
        gain = f" It gains {number(found.expected_gain)} over the last." if found.expected_gain > 0 else ""
        reason = clean(found.reason).rstrip(".")
        notes.append(f"{lead_in}. {reason}.{gain}")
    header, words = f"step, {clean(found.metric)}, verdict, mark", "verdict, mark"
    return Section(
        "validation", "Generalisation", lead[0].upper() + lead[1:], table(header, rows, words=words), tuple(notes)
    )


def _learning_rate(report: Report) -> Section | None:
    found = report.learning_rate
    if found is None:
        return None
    lead = (
        f"{found.schedule} schedule, peak {number(found.peak)} after {step(found.warmup_steps)} warm-up steps, "
        f"last {number(found.last)}; at 0.8 of the peak or more for {share(found.high_share)} of the run."
    )
    notes = tuple(
        f"Raised {number(raised.factor)} times, to {number(raised.peak)}, at {interval(raised.steps)}"
        f"{'' if raised.is_over else ', to the end'}."
        for raised in found.raised
    )
    if found.anomalies_at_high_share is not None:
        notes += (f"{share(found.anomalies_at_high_share)} of the anomalies fell into that time.",)
    return Section("learning-rate", "Learning rate", lead[0].upper() + lead[1:], notes=notes)


def _throughput(found: Throughput | None) -> Section | None:
    if found is None:
        return None
    rows = [
        (clean(phase), share(part), number(part * found.step_s))
        for phase, part in sorted(found.shares.items(), key=lambda item: -item[1])
    ]
    facts = {
        "tokens per second": number(found.tokens_per_s),
        "MFU": share(found.mfu),
        "step time grew by": MISSING if found.drift_percent is None else percent(found.drift_percent),
        "memory grows by": f"{number(found.leak_gib_per_1000_steps)} GiB per 1000 steps",
        "goodput": share(found.goodput),
    }
    known = "; ".join(f"{name} {value}" for name, value in facts.items() if MISSING not in value)
    lead = f"A step takes {number(found.step_s)} s. {clean(found.bottleneck)}"
    return Section(
        "throughput",
        "Speed and memory",
        lead,
        table("phase, share, seconds", rows, words="phase") if rows else None,
        (f"{known[0].upper()}{known[1:]}.",) if known else (),
    )


def _trends(report: Report) -> Section | None:
    rows = [
        (clean(t.key), number(t.early), number(t.middle), number(t.late), number(t.slope_per_step), number(t.p_value))
        for t in report.trends
    ]
    lead = "Means of the thirds of the run; slope by Theil-Sen, p by Mann-Kendall."
    lasts = [f"{clean(t.key)}, last means: {', '.join(map(number, t.last_means))}." for t in report.trends]
    notes = tuple(note for trend, note in zip(report.trends, lasts, strict=True) if trend.last_means)
    header = "metric, early, middle, late, slope per step, p"
    return Section("trends", "Trends", lead, table(header, rows, words="metric"), notes) if rows else None


def _metrics(report: Report) -> Section | None:
    order = {group: place for place, group in enumerate(GROUPS)}
    rows = [
        (
            clean(f"{m.key} [{m.unit}]" if m.unit else m.key),
            m.group,
            number(m.first),
            number(m.last),
            f"{number(m.minimum)} @ {step(m.minimum_step)}",
            f"{number(m.maximum)} @ {step(m.maximum_step)}",
            number(m.median),
            m.trend,
            m.direction,
            clean(" ".join(part for part in (m.meaning, m.observation) if part)),
        )
        for m in sorted(report.metrics, key=lambda m: order.get(m.group, len(order)))
    ]
    header = "metric, group, first, last, min, max, median, trend, better, meaning"
    words = "metric, group, trend, better, meaning"
    lead = f"Metrics that were logged: {len(rows)}."
    return Section("metrics", "Metrics", lead, table(header, rows, words=words)) if rows else None


def _checklist(report: Report) -> Section | None:
    if not report.checklist:
        return None
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))
    rows = [(item.status, item.phase, clean(item.text), clean(item.detail)) for item in items]
    counts = {status: sum(item.status == status for item in items) for status in reversed(STATUSES)}
    lead = ", ".join(f"{count} {status}" for status, count in counts.items()) + "."
    columns = "status, phase, check, detail"
    return Section("checklist", "Checklist", lead, table(columns, rows, words=columns))


def _appendix(report: Report) -> Section | None:
    rows = [
        (clean(name), number(value), "yes" if name in report.overridden else "")
        for name, value in report.thresholds.items()
    ]
    notes = tuple(f"{clean(rule)} was not judged: {clean(reason)}." for rule, reason in report.insufficient)
    lead = (
        f"Limits in use: {len(rows)}, overridden: {len(report.overridden)}. "
        f"Rules that could not be judged: {len(report.insufficient)}."
    )
    header, words = "limit, value, overridden", "limit, overridden"
    return Section("limits", "Limits", lead, table(header, rows, words=words), notes) if rows or notes else None
