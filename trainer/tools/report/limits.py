"""The limits that findings are judged by, by name: `report --config` overrides single ones."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from trainer.config import did_you_mean
from trainer.tools.report.bands import BANDS

LIMITS: Mapping[str, float] = {
    name: limit for row in BANDS for name, limit in row.limits.items() if isfinite(limit)
} | {
    "latency_budget": 0,  # ms; 0: as the configuration says
    "trend_p": 0.05,  # Mann-Kendall: a trend is significant below this
}


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Return all limits, those of `overrides` in place of the defaults.

    Raise `ValueError` for an unknown name.
    """
    for name in overrides or {}:
        if name not in LIMITS:
            hint = did_you_mean(name, LIMITS) or "the report's section Limits lists all"
            raise ValueError(f"unknown threshold {name!r}: {hint}")
    return {**LIMITS, **(overrides or {})}


def read_thresholds(path: Path) -> dict[str, float]:
    """Return limits from a file of `name: number` lines; comments begin with #.

    Raise `ValueError` naming file and line for anything else, and for an unknown name.
    """
    limits: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        content = line.partition("#")[0].strip()
        name, _, value = content.partition(":")
        try:
            if content:
                limits[name.strip()] = float(value)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {content!r} is not `name: number`") from error
    merged(limits)
    return limits
