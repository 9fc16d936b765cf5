"""The result of an analysis: what text, page and JSON show; docs/report.schema.json says what
its fields mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.runtime.json_lines import strict
from trainer.tools.report.run_log import ServingCheck

LEVELS = ("fail", "warn", "note", "info")
"""Levels of a finding, worst first."""


@dataclass(frozen=True)
class Finding:
    """One thing a rule found. `id` is stable: the rule's name, with the metric or step where it
    can fire twice.
    """

    id: str
    rule: str
    level: str
    title: str
    metric: str | None = None
    steps: tuple[int, int] | None = None
    value: float | None = None
    threshold: float | None = None
    evidence: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mover:
    """A metric that left its usual range together with an anomaly."""

    metric: str
    sign: int
    z: float
    onset_step: int
    peak_step: int
    peak_value: float


@dataclass(frozen=True)
class Anomaly:
    """An interval in which metrics left their usual range; neighbouring points are merged."""

    steps: tuple[int, int]
    metric: str
    peak_step: int
    peak_value: float
    z: float
    ratio: float
    percent: float
    has_recovered: bool
    movers: tuple[Mover, ...] = ()
    chain: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricSummary:
    key: str
    group: str
    unit: str
    meaning: str
    direction: str
    num_points: int
    first: float
    last: float
    minimum: float
    minimum_step: int
    maximum: float
    maximum_step: int
    median: float
    trend: str
    observation: str


@dataclass(frozen=True)
class Generalisation:
    metric: str
    values: Mapping[int, float]
    best_step: int
    best_value: float
    last_value: float
    gap: float
    verdicts: Mapping[int, str]
    overfit_step: int | None
    recommended_step: int | None
    recommended_path: Path | None
    reason: str
    expected_gain: float

    @property
    def checkpoint(self) -> dict[str, object] | None:
        """The best to use; None where no step is recommended."""
        told = (self.recommended_step, self.recommended_path, self.reason, self.expected_gain)
        return (
            None
            if told[0] is None
            else dict(zip(("step", "path", "reason", "expected_gain"), told, strict=True))
        )


@dataclass(frozen=True)
class RaisedRate:
    """A stretch in which the learning rate lies above its schedule."""

    steps: tuple[int, int]
    level: float
    peak: float
    is_over: bool

    @property
    def factor(self) -> float:
        return self.peak / self.level


@dataclass(frozen=True)
class LearningRate:
    schedule: str
    peak: float
    warmup_steps: int
    last: float
    high_share: float
    anomalies_at_high_share: float | None
    raised: tuple[RaisedRate, ...] = ()


@dataclass(frozen=True)
class Throughput:
    step_s: float
    shares: Mapping[str, float]
    bottleneck: str
    tokens_per_s: float | None
    mfu: float | None
    goodput: float | None


@dataclass(frozen=True)
class CheckItem:
    """One line of the checklists: the first 100 steps, each checkpoint, the end."""

    id: str
    phase: str
    text: str
    status: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All sections of one run. `insufficient` names rules that could not be judged, with the
    reason.
    """

    title: str
    source: str
    path: Path
    profile: str
    verdict: str
    headline: str
    facts: Mapping[str, str]
    top: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    metrics: tuple[MetricSummary, ...]
    anomalies: tuple[Anomaly, ...]
    generalisation: Generalisation | None
    learning_rate: LearningRate | None
    throughput: Throughput | None
    serving: tuple[ServingCheck, ...]
    checklist: tuple[CheckItem, ...]
    thresholds: Mapping[str, float]
    overridden: tuple[str, ...]
    insufficient: tuple[tuple[str, str], ...]
    closing: str
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)


SCHEMA = "fsdp-sft-report/4"
ELSEWHERE = ("path", "profile", "headline", "facts", "closing", "evaluations")
"""Fields of a report that are part of others in JSON, or none."""


def as_json(report: Report) -> dict[str, Any]:
    """Every number as it was computed, with all its digits."""
    best = report.generalisation
    tree = {
        "schema": SCHEMA,
        **{name: value for name, value in vars(report).items() if name not in ELSEWHERE},
        "source": {"format": report.source, "path": report.path, "profile": report.profile},
        "summary": {"headline": report.headline, "facts": report.facts, "closing": report.closing},
        "top": [finding.id for finding in report.top],
        "best_checkpoint": None if best is None else best.checkpoint,
        "insufficient": [{"rule": rule, "reason": reason} for rule, reason in report.insufficient],
    }
    return dict(strict(tree, nonfinite=lambda _: None))
