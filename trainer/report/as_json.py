"""The report as plain containers for JSON, described by `docs/report.schema.json`. JSON has no NaN: it becomes null."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.result import Finding, Report

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
    """Dataclasses as objects, tuples as arrays, keys as text, and null for what is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
