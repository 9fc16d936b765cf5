"""The limits that findings are judged by, by name: `report --config` overrides single ones."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from trainer.config import did_you_mean
from trainer.tools.report.bands import BANDS
from trainer.train.detection.validations import OVERFITTING

_OF_BANDS = {
    band.limit(side): limit
    for band in BANDS
    for side, limit in (("low", band.low), ("high", band.high))
    if isfinite(limit)
}
LIMITS: Mapping[str, float] = {
    **dict(sorted(_OF_BANDS.items())),
    "loss_swing": 2.0,  # a policy's loss stays within plus or minus this
    "time_growth": 0.1,  # share by which steps get slower over the run
    "stall": 6,  # times the usual step time
    "leak": 0.01,  # growth of memory per 1000 steps
    "latency_budget": 0,  # ms; 0: as the configuration says
    "trend_p": 0.05,  # Mann-Kendall: a trend is significant below this
    "min_epochs": 20,  # a controller is not judged before
    "min_points": 100,
    "min_evals": 3,
    **OVERFITTING,
}


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Return all limits, those of `overrides` in place of the defaults.

    Raises `ValueError` for an unknown name.
    """
    for name in overrides or {}:
        if name not in LIMITS:
            hint = did_you_mean(name, LIMITS) or "the report's section Limits lists all"
            raise ValueError(f"unknown threshold {name!r}: {hint}")
    return {**LIMITS, **(overrides or {})}


def read_thresholds(path: Path) -> dict[str, float]:
    """Return limits from a file of `name: number` lines; comments begin with #.

    Raises `ValueError` naming file and line for anything else, and for an unknown name.
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
