"""The sections of a report as data. The terminal and the page render the same list."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.tools.report.formatting import MISSING, shown
from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Finding, Report
from trainer.tools.report.run_log import RunLog

MAX_PLOTS = 12
"""The number of plots besides the loss plot."""
LOSSES = (*ROLES["loss"], *ROLES["val_loss"])
STATUSES = ("fail", "note", "unknown", "pass")
"""The statuses of checklist lines, in display order."""
LEGEND = (
    "Pale: as logged; dark: smoothed by 0.9; points: validation. Yellow: anomaly; dashed: best "
    "validation; red cross: not finite."
)
INTERVALS = "Means with 95 % intervals: checkpoints with overlapping intervals may be equally good."
HARD_ROWS = "Rows whose loss exceeds the loss of their batches most: wrong, unusual or hard rows."
SAMPLE = "The first sample of the last start, with its supervised part in [[ ]]."
GENERALISATION = "recommended_step recommended_path reason metric best_step best_value last_value"
ANOMALY = "steps metric peak_step peak_value ratio has_recovered percent movers chain"
RATE = "schedule peak warmup_steps last high_share anomalies_at_high_share"
SPEED = "bottleneck step_s"
PROOF = "step engine is_equal causes val_loss served_loss tolerance"
METRIC = (
    "key first last minimum maximum trend group minimum_step maximum_step unit direction meaning"
)


@dataclass(frozen=True)
class Plot:
    """A plot of one or more metrics, named by their keys in the log."""

    title: str
    about: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, findings, a table, and plots."""

    title: str
    rows: Sequence[Sequence[Any]] = ()
    header: Sequence[str] = ()
    lead: str = ""
    findings: Sequence[Finding] = ()
    plots: Sequence[Plot] = ()
    is_detail: bool = False
    """True if only the page shows the section."""

    @property
    def has_content(self) -> bool:
        return bool(self.rows or self.findings or self.plots)


def sections(report: Report, log: RunLog) -> list[Section]:
    """Return the sections that have content: the main findings, the next steps, then details."""
    others = [finding for finding in report.findings if finding not in report.top]
    events = [event for event in reversed(log.events) if event.kind != "checkpoint"]
    items = sorted(report.checklist, key=lambda item: STATUSES.index(item.status))
    shares = report.throughput.shares if report.throughput else {}
    sample = [[log.sample]] if log.sample else []
    found = [
        Section("What matters", findings=report.top),
        Section("What next", [[report.closing.removeprefix("Next: ")]]),
        Section("Also found", findings=others),
        Section("Run", [*report.facts.items()]),
        Section(
            "Plots",
            lead=LEGEND,
            plots=_plots(report, log),
            is_detail=True,
        ),
        _table("What happened", events, "step kind level message"),
        _facts("Generalisation", report.generalisation, GENERALISATION),
        _table("Anomalies", report.anomalies, ANOMALY),
        _table("Hardest rows", log.hard_rows, "excess loss num_steps place", HARD_ROWS),
        _table("Served loss", log.proofs, PROOF),
        _evaluations(log),
        _facts("Learning rate", report.learning_rate, RATE),
        _facts("Speed", report.throughput, SPEED),
        Section("Shares of a step", [*shares.items()]),
        _table("Checklist", items, "status text detail phase"),
        _table("Metrics", report.metrics, METRIC),
        Section("Configuration", [*log.config.items()], is_detail=True),
        Section("Machine and versions", [*log.environment.items()], is_detail=True),
        Section("Sample", sample, lead=SAMPLE, is_detail=True),
        Section("Not judged", report.insufficient, is_detail=True),
    ]
    return [section for section in found if section.has_content]


def _table(
    title: str,
    items: Iterable[object],
    names: str,
    lead: str = "",
) -> Section:
    """Make a section with a table: one row per item, one column per named attribute."""
    columns = names.split()
    rows = [[getattr(item, name) for name in columns] for item in items]
    return Section(title, rows, [name.replace("_", " ") for name in columns], lead)


def _facts(title: str, item: object, names: str) -> Section:
    """Make a section with one row per named attribute; rows without a value are left out."""
    facts = [(name.replace("_", " "), getattr(item, name, None)) for name in names.split()]
    return Section(title, [fact for fact in facts if shown(fact[1]) not in ("", MISSING)])


def _plots(report: Report, log: RunLog) -> list[Plot]:
    """Return a plot of the losses, then plots of metrics that checks use or that left their usual
    range.
    """
    losses = tuple(key for key in LOSSES if key in log.series)
    moved = {mover.metric for anomaly in report.anomalies for mover in anomaly.movers}
    wanted = moved.union(*ROLES.values()) - {*LOSSES, *ROLES["epoch"]}
    varying = [one for one in report.metrics if one.key in wanted and one.minimum < one.maximum]
    plots = [Plot(one.key, one.meaning, (one.key,)) for one in varying[:MAX_PLOTS]]
    return [Plot("Loss", ", ".join(losses), losses), *plots] if losses else plots


def _evaluations(log: RunLog) -> Section:
    rows = [
        (name, at, summary["mean"], summary.get("low"), summary.get("high"))
        for name, summaries in log.evaluations.items()
        for at, summary in summaries.items()
    ]
    return Section("Evaluations", rows, ("evaluation", "step", "mean", "low", "high"), INTERVALS)
