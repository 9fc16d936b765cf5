"""The sections of a report: plain blocks that the terminal and the page show in the same order."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.tools.report.formatting import capitalised, interval, number, share, shown, step, told
from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Finding, Generalisation, LearningRate, Report, Throughput
from trainer.tools.report.run_log import RunLog

STATUSES = ("fail", "note", "unknown", "pass")
MAX_PLOTS = 12
"""Beside the loss."""
LOSSES = (*ROLES["loss"], *ROLES["val_loss"])
PLOTS = (
    "Pale: as logged; dark: smoothed by 0.9; points: validation. Yellow: anomaly; triangle: "
    "checkpoint; dashed: best validation; red cross: not a number."
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def is_number(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned right."""
        return all(row[column][:1] in "0123456789-+–" for row in self.rows)


@dataclass(frozen=True)
class Plot:
    """The course of metrics, by their keys in the log."""

    title: str
    about: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading, one sentence, findings, a table, notes on it, and plots."""

    id: str
    title: str
    lead: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    plots: tuple[Plot, ...] = ()
    is_detail: bool = False
    """Only the page shows it."""

    @property
    def is_empty(self) -> bool:
        return not (self.table or self.notes or self.findings or self.plots or self.lead)


def table_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table | None:
    """Make a table of values, written by their types; None without rows."""
    cells = tuple(tuple(map(_cell, row)) for row in rows)
    return Table(tuple(header), cells) if cells else None


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "; ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)


def _attributes(items: Iterable[object], names: str) -> Table | None:
    """Make a table with an item a row and the named attributes as columns."""
    columns = names.split()
    rows = [[getattr(item, name) for name in columns] for item in items]
    return table_of([name.replace("_", " ") for name in columns], rows)


def sections(report: Report, log: RunLog) -> tuple[Section, ...]:
    """Return the sections that have something to say: what matters, what next, then details."""
    others = tuple(finding for finding in report.findings if finding not in report.top)
    best, rate, speed = report.generalisation, report.learning_rate, report.throughput
    found = (
        Section("top", "What matters", findings=report.top),
        Section("next", "What next", report.closing.removeprefix("Next: ")),
        Section("findings", "Also found", findings=others),
        _plots(report, log),
        _events(log),
        _validation(best) if best else None,
        _anomalies(report),
        _hard_rows(log),
        _serving(report) if report.serving else None,
        _evaluations(report) if report.evaluations else None,
        _learning_rate(rate) if rate else None,
        _throughput(speed) if speed else None,
        _checklist(report) if report.checklist else None,
        _metrics(report) if report.metrics else None,
        _configuration(log),
        *_origins(log),
        _limits(report) if report.thresholds else None,
    )
    return tuple(section for section in found if section and not section.is_empty)


def _plots(report: Report, log: RunLog) -> Section:
    """Show the loss, then the metrics that findings ask for or that left their usual range."""
    losses = tuple(key for key in LOSSES if key in log.series)
    moved = {mover.metric for anomaly in report.anomalies for mover in anomaly.movers}
    wanted = moved.union(*ROLES.values()) - {*LOSSES, *ROLES["epoch"]}
    varying = [one for one in report.metrics if one.key in wanted and one.minimum < one.maximum]
    plots = [Plot("Loss", ", ".join(losses), losses)] if losses else []
    plots += [Plot(one.key, one.observation, (one.key,)) for one in varying[:MAX_PLOTS]]
    lead = PLOTS if plots else ""
    return Section("plots", "Plots", lead, plots=tuple(plots), is_detail=True)


def _events(log: RunLog) -> Section:
    """Show what happened, the newest first, without what recurs."""
    events = [event for event in reversed(log.events) if event.kind != "checkpoint"]
    return Section("events", "What happened", table=_attributes(events, "step kind level message"))


def _validation(best: Generalisation) -> Section:
    side = "above" if best.gap >= 0 else "below"
    gap = told(abs(best.gap), f"; validation is {{}} {side} training at the end")
    lead = (
        f"{capitalised(best.metric)}: best {number(best.best_value)} at step "
        f"{step(best.best_step)}, last {number(best.last_value)}{gap}."
    )
    verdicts = sorted(best.verdicts.items(), reverse=True)
    rows = [(at, best.values[at], verdict) for at, verdict in verdicts]
    notes = []
    if best.recommended_step is not None:
        at, path = step(best.recommended_step), best.recommended_path
        chosen = f"Use the checkpoint of step {at} ({path})" if path else f"Step {at} was best"
        gain = told(best.expected_gain or None, " It gains {} over the last.")
        notes.append(f"{chosen}. {best.reason.rstrip('.')}.{gain}")
    table = table_of(("step", best.metric, "verdict"), rows)
    return Section("validation", "Generalisation", lead, table, tuple(notes))


def _anomalies(report: Report) -> Section:
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
        for one in report.anomalies
    ]
    header = ("steps", "metric", "peak", "to usual", "recovered", "z", "moved")
    chains = Counter(" → ".join(one.chain) for one in report.anomalies if len(one.chain) > 1)
    notes = (
        f"Order of onset in {times} of {len(rows)}: {chain}."
        for chain, times in chains.most_common(3)
    )
    lead = "Intervals in which metrics left their usual range." if rows else ""
    return Section("anomalies", "Anomalies", lead, table_of(header, rows), tuple(notes))


def _hard_rows(log: RunLog) -> Section:
    rows = [(one.excess, one.loss, one.num_steps, one.place) for one in log.hard_rows]
    lead = "Rows whose loss exceeds that of their batches most: wrong, odd or hard." if rows else ""
    header = ("above its batch", "last loss", "steps", "row")
    return Section("rows", "Hardest rows", lead, table_of(header, rows))


def _serving(report: Report) -> Section:
    num_equal, num_proofs = sum(one.is_equal for one in report.serving), len(report.serving)
    lead = (
        f"In {num_equal} of {num_proofs} proofs an export serves the loss its step was validated "
        "with."
    )
    names = "step engine is_equal causes val_loss served_loss tolerance"
    return Section("serving", "Served loss", lead, _attributes(report.serving, names))


def _evaluations(report: Report) -> Section:
    rows = [
        (name, at, result["mean"], result.get("low"), result.get("high"))
        for name, results in report.evaluations.items()
        for at, result in results.items()
    ]
    lead = "Means, with 95 % intervals: checkpoints whose intervals overlap may be equally good."
    table = table_of(("evaluation", "step", "mean", "low", "high"), rows)
    return Section("evaluations", "Evaluations", lead, table)


def _learning_rate(rate: LearningRate) -> Section:
    lead = (
        f"{capitalised(rate.schedule)} schedule, peak {number(rate.peak)} after "
        f"{step(rate.warmup_steps)} warm-up steps, last {number(rate.last)}; at 0.8 of the peak or "
        f"more for {share(rate.high_share)} of the run."
    )
    notes = [
        f"Raised {number(one.factor)} times, to {number(one.peak)}, at {interval(one.steps)}"
        f"{'' if one.is_over else ', to the end'}."
        for one in rate.raised
    ]
    if rate.anomalies_at_high_share is not None:
        notes.append(f"{share(rate.anomalies_at_high_share)} of the anomalies fell into that time.")
    return Section("learning-rate", "Learning rate", lead, notes=tuple(notes))


def _throughput(speed: Throughput) -> Section:
    shares = sorted(speed.shares.items(), key=lambda item: item[1], reverse=True)
    rows = [(phase, share(part), part * speed.step_s) for phase, part in shares]
    sentences = (
        f"A step takes {number(speed.step_s)} s.",
        speed.bottleneck,
        told(speed.tokens_per_s, "{} tokens per second."),
        told(share(speed.mfu), "MFU {}."),
        told(share(speed.goodput), "Goodput {}."),
    )
    table = table_of(("phase", "share", "seconds"), rows)
    return Section("throughput", "Speed and memory", " ".join(filter(None, sentences)), table)


def _checklist(report: Report) -> Section:
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))
    counts = Counter(item.status for item in items)
    lead = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES))
    table = _attributes(items, "status text detail phase")
    return Section("checklist", "Checklist", f"{lead}.", table)


def _metrics(report: Report) -> Section:
    names = (
        "key first last minimum maximum trend minimum_step maximum_step median unit direction "
        "observation meaning"
    )
    table = _attributes(report.metrics, names)
    return Section("metrics", "Metrics", f"{len(report.metrics)} were logged.", table)


def _configuration(log: RunLog) -> Section:
    table = table_of(("key", "value"), log.config.items())
    return Section("configuration", "Configuration", table=table, is_detail=True)


def _origins(log: RunLog) -> tuple[Section, ...]:
    """Show the machine, the versions and a sample."""
    environment = table_of(("name", "value"), log.environment.items())
    sample = table_of(
        ("the first sample of the last start, its supervised part in [[ ]]",), [[log.sample]]
    )
    return (
        Section("environment", "Machine and versions", table=environment, is_detail=True),
        Section("sample", "Sample", table=sample if log.sample else None, is_detail=True),
    )


def _limits(report: Report) -> Section:
    rows = [(name, limit, name in report.overridden) for name, limit in report.thresholds.items()]
    table = table_of(("limit", "value", "overridden"), rows)
    notes = (f"{rule} was not judged: {reason}." for rule, reason in report.insufficient)
    return Section("limits", "Limits", table=table, notes=tuple(notes), is_detail=True)
