"""The report as plain containers for JSON, described by `docs/report.schema.json`. JSON has no NaN: it becomes null."""

from typing import Any

from trainer.report.result import Finding, Report
from trainer.runtime.json_lines import strict

SCHEMA = "fsdp-sft-report/2"


def as_json(report: Report) -> dict[str, Any]:
    """Every number as it was computed, with all its digits."""
    found = report.generalisation
    return {
        "schema": SCHEMA,
        "source": {"format": report.source, "path": str(report.path), "profile": report.profile},
        "title": report.title,
        "verdict": report.verdict,
        "summary": {"headline": report.headline, "facts": dict(report.facts), "closing": report.closing},
        "top": [finding.id for finding in report.top],
        "findings": [_finding(finding) for finding in report.findings],
        "anomalies": _plain(report.anomalies),
        "best_checkpoint": None
        if found is None or found.recommended_step is None
        else {
            "step": found.recommended_step,
            "path": None if found.recommended_path is None else str(found.recommended_path),
            "reason": found.reason,
            "expected_gain": _plain(found.expected_gain),
        },
        "generalisation": _plain(found),
        "learning_rate": _plain(report.learning_rate),
        "throughput": _plain(report.throughput),
        "trends": _plain(report.trends),
        "metrics": _plain(report.metrics),
        "correlations": [{"metrics": [a, b], "rho": _plain(rho)} for a, b, rho in report.correlations],
        "checklist": _plain(report.checklist),
        "thresholds": _plain(report.thresholds),
        "overridden": list(report.overridden),
        "insufficient": [{"rule": rule, "reason": reason} for rule, reason in report.insufficient],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    names = ("id", "rule", "level", "title", "metric", "steps", "value", "threshold", "evidence", "cause", "remedy")
    return {name: _plain(getattr(finding, name)) for name in names}


def _plain(value: Any) -> Any:
    return strict(value, nonfinite=lambda _: None)
