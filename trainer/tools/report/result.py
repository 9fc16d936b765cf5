"""The result of an analysis, which the terminal, the page and the JSON output show.

docs/report.schema.json describes the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runtime.json_lines import strict

SCHEMA = "fsdp-sft-report/6"
LEVELS = ("fail", "warn", "note", "info")
"""Levels of a finding, worst first."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    `id` is stable: it is the name of the check, plus a metric or step if the check can fire twice.
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

    @property
    def begin(self) -> int:
        """The first step; 0 for a finding without steps."""
        return self.steps[0] if self.steps else 0


@dataclass(frozen=True)
class Mover:
    """A metric that moved away from its usual level during an anomaly."""

    metric: str
    sign: int
    z: float
    onset_step: int
    peak_step: int
    peak_value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.peak_value:.4g}"


@dataclass(frozen=True)
class Anomaly:
    """An interval in which metrics left their usual range."""

    steps: tuple[int, int]
    metric: str
    peak_step: int
    peak_value: float
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
    trend: str


@dataclass(frozen=True)
class Generalisation:
    metric: str
    values: Mapping[int, float]
    best_step: int
    best_value: float
    last_value: float
    verdicts: Mapping[int, str]
    overfit_step: int | None
    recommended_step: int | None
    recommended_path: Path | None
    reason: str


@dataclass(frozen=True)
class RaisedRate:
    """A stretch in which the learning rate is above its schedule."""

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


@dataclass(frozen=True)
class CheckItem:
    """One line of a checklist. `phase` names the checklist: the first 100 steps, each checkpoint,
    or the end.
    """

    id: str
    phase: str
    text: str
    status: str
    detail: str


@dataclass(frozen=True)
class Report:
    """All results for one run. `insufficient` lists the checks that could not judge, with the
    reasons.
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
    checklist: tuple[CheckItem, ...]
    insufficient: tuple[tuple[str, str], ...]
    closing: str


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values with all digits. Non-finite numbers become null."""
    return dict(strict({"schema": SCHEMA, **vars(report)}, nonfinite=lambda _: None))
