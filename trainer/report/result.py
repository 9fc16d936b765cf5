"""The result of an analysis: what text, page and JSON show alike. Nothing here computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.report.run_log import ServingCheck
from trainer.runtime.json_lines import strict

LEVELS = ("fail", "warn", "note", "info")
"""Of a finding, worst first."""
VERDICTS = ("FAIL", "ATTENTION", "OK", "INSUFFICIENT")
"""FAIL: some finding is fail; ATTENTION: some is warn; INSUFFICIENT: too little was logged to say OK."""


@dataclass(frozen=True)
class Finding:
    """One thing a rule found. `id` is stable: the rule's name, with the metric or step where it can fire twice."""

    id: str
    rule: str
    """V01 to V46."""
    level: str
    title: str
    """One sentence: what is the matter."""
    metric: str | None = None
    steps: tuple[int, int] | None = None
    value: float | None = None
    threshold: float | None = None
    evidence: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""
    """What to do, with the configuration key and a value."""
    reasons: tuple[str, ...] = ()
    """For each piece of advice in it the principle, and what it costs."""


@dataclass(frozen=True)
class Mover:
    """A metric that left its usual range together with an anomaly."""

    metric: str
    sign: int
    """+1 rose, -1 fell."""
    z: float
    onset_step: int
    peak_step: int
    peak_value: float


@dataclass(frozen=True)
class Anomaly:
    """An interval in which metrics left their usual range; neighbouring points are merged."""

    steps: tuple[int, int]
    metric: str
    """The one that stands out most."""
    peak_step: int
    peak_value: float
    z: float
    ratio: float
    """Peak over the usual level; NaN where the level is zero or signs differ."""
    percent: float
    """Place in the run, 0 to 100."""
    has_recovered: bool
    movers: tuple[Mover, ...] = ()
    chain: tuple[str, ...] = ()
    """Moving metrics in the order in which they set in."""


@dataclass(frozen=True)
class MetricSummary:
    key: str
    group: str
    """optimisation, reward, length, state, timing, memory, data or other."""
    unit: str
    meaning: str
    direction: str
    """down (lower is better), up, middle or none."""
    num_points: int
    first: float
    last: float
    minimum: float
    minimum_step: int
    maximum: float
    maximum_step: int
    median: float
    trend: str
    """rising, falling, flat or unclear."""
    observation: str
    """What this run shows, one sentence."""


@dataclass(frozen=True)
class Trend:
    key: str
    slope_per_step: float
    """Theil-Sen, on epoch means or on 50 bins."""
    p_value: float
    """Mann-Kendall."""
    early: float
    middle: float
    late: float
    """Means of the thirds."""
    last_means: tuple[float, ...] = ()
    """Of the last ten epochs, or bins."""


@dataclass(frozen=True)
class Generalisation:
    metric: str
    """What is compared: the validation loss, or the reward or accuracy on held-out samples, or an external result."""
    values: Mapping[int, float]
    """By the step of each validation."""
    best_step: int
    best_value: float
    last_value: float
    gap: float
    """Validation minus training loss at the end; NaN where it is no loss."""
    verdicts: Mapping[int, str]
    """Step of each validation -> ok, note or overfit; "" where it is no loss."""
    overfit_step: int | None
    recommended_step: int | None
    """Best among the checkpoints that exist; the best step where none is known to exist."""
    recommended_path: Path | None
    reason: str
    expected_gain: float
    """How much better the recommended step is than the last, in the metric that decides."""


@dataclass(frozen=True)
class RaisedRate:
    """A stretch in which the learning rate lies above its schedule."""

    steps: tuple[int, int]
    level: float
    """Just before it."""
    peak: float
    is_over: bool
    """Whether the rate jumped back."""

    @property
    def factor(self) -> float:
        return self.peak / self.level


@dataclass(frozen=True)
class LearningRate:
    schedule: str
    """constant, linear, cosine, wsd, step or unknown; without the stretches of `raised`, as all that follows."""
    peak: float
    warmup_steps: int
    last: float
    high_share: float
    """Share of the run at 0.8 of the peak or more."""
    anomalies_at_high_share: float | None
    """Share of the anomalies that fell there; None without anomalies."""
    raised: tuple[RaisedRate, ...] = ()


@dataclass(frozen=True)
class Throughput:
    step_s: float
    """Median."""
    shares: Mapping[str, float]
    """Phase -> share of the step time."""
    bottleneck: str
    """One sentence."""
    tokens_per_s: float | None
    mfu: float | None
    drift_percent: float | None
    """How much the step time grew over the run."""
    leak_gib_per_1000_steps: float | None
    goodput: float | None


@dataclass(frozen=True)
class CheckItem:
    """One line of the checklists: the first 100 steps, each checkpoint, the end."""

    id: str
    phase: str
    """start, checkpoint or end."""
    text: str
    status: str
    """pass, fail, note (unusual, by itself no fault) or unknown."""
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All sections of one run. `insufficient` names rules that could not be judged, with the reason."""

    title: str
    source: str
    path: Path
    profile: str
    """sft, grpo, controller or generic: which absolute bands apply."""
    verdict: str
    headline: str
    """The verdict in one sentence."""
    facts: Mapping[str, str]
    """Header lines: steps, time span, attempts, rows skipped, ..."""
    top: tuple[Finding, ...]
    """The three that matter most."""
    findings: tuple[Finding, ...]
    metrics: tuple[MetricSummary, ...]
    trends: tuple[Trend, ...]
    anomalies: tuple[Anomaly, ...]
    correlations: tuple[tuple[str, str, float], ...]
    """Pairs whose residuals move together: Spearman's rho beyond 0.6."""
    generalisation: Generalisation | None
    learning_rate: LearningRate | None
    throughput: Throughput | None
    serving: tuple[ServingCheck, ...]
    """Proofs that exports serve the loss they were validated with, by step."""
    checklist: tuple[CheckItem, ...]
    thresholds: Mapping[str, float]
    overridden: tuple[str, ...]
    insufficient: tuple[tuple[str, str], ...]
    closing: str
    """Two or three sentences: what to do next."""
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    """As in the log."""


SCHEMA = "fsdp-sft-report/2"
AS_THEY_ARE = (
    *("title", "verdict", "findings", "anomalies", "generalisation", "learning_rate", "throughput", "trends"),
    *("metrics", "serving", "checklist", "thresholds", "overridden"),
)


def as_json(report: Report) -> dict[str, Any]:
    """Every number as it was computed, with all its digits."""
    best = report.generalisation
    tree = {
        "schema": SCHEMA,
        "source": {"format": report.source, "path": report.path, "profile": report.profile},
        **{name: getattr(report, name) for name in AS_THEY_ARE},
        "summary": {"headline": report.headline, "facts": report.facts, "closing": report.closing},
        "top": [finding.id for finding in report.top],
        "best_checkpoint": None
        if best is None or best.recommended_step is None
        else {
            "step": best.recommended_step,
            "path": best.recommended_path,
            "reason": best.reason,
            "expected_gain": best.expected_gain,
        },
        "correlations": [{"metrics": [a, b], "rho": rho} for a, b, rho in report.correlations],
        "insufficient": [{"rule": rule, "reason": reason} for rule, reason in report.insufficient],
    }
    return dict(strict(tree, nonfinite=lambda _: None))
