"""The report as plain containers for JSON, described by `docs/report.schema.json`. JSON has no NaN: it becomes null."""

from typing import Any

from trainer.report.result import Report
from trainer.runtime.json_lines import strict

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
