"""The limits that findings are judged by, by name: `report --config` overrides single ones."""

from collections.abc import Mapping
from pathlib import Path

from trainer.config import did_you_mean
from trainer.detection.watches import OVERFITTING
from trainer.report.bands import BANDS

_OWN = {
    "diverging_ratio": 1.25,  # present level of a loss over its best
    "diverging_rise": 0.1,  # and at least this much above it, nat
    "loss_swing": 2.0,  # a policy's loss stays within plus or minus this
    "slowdown": 1.5,  # times: tokens per second or step time this much worse, and to the end
    "time_growth": 0.1,  # share by which steps get slower over the run
    "stall": 6,  # times the usual step time
    "leak": 0.01,  # growth of memory per 1000 steps
    "latency_budget": 0,  # ms; 0: as the configuration says
    "gap": 0.5,  # validation minus training loss, over validation loss
    "val_rises": 3,  # validations rising in a row
    "val_rises_fail": 5,
    "trend_p": 0.05,  # Mann-Kendall: a trend is significant below this
    "rising_p": 0.01,  # the same for rises that raise an alarm
    "min_epochs": 20,  # a controller is not judged before
    "min_points": 100,
    "min_evals": 3,
}


def _of_bands() -> dict[str, float]:
    sides = {(band.limit(side), getattr(band, side)) for band in BANDS for side in ("low", "high")}
    return {name: limit for name, limit in sides if abs(limit) < float("inf")}


LIMITS: Mapping[str, float] = {**dict(sorted(_of_bands().items())), **_OWN, **OVERFITTING}


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Return all limits, those of `overrides` in place of the defaults.

    Raises `ValueError` for an unknown name.
    """
    _check_names(overrides or {}, "among the thresholds given")
    return {**LIMITS, **(overrides or {})}


def read_thresholds(path: Path) -> dict[str, float]:
    """Return limits from a file of `name: number` lines; comments begin with #.

    Raises `ValueError` naming file and line for anything else, and for an unknown name.
    """
    limits: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if content := line.split("#", 1)[0].strip():
            name, _, value = content.partition(":")
            try:
                limits[name.strip()] = float(value)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {content!r} is not `name: number`"
                ) from error
    _check_names(limits, f"in {path}")
    return limits


def _check_names(limits: Mapping[str, float], place: str) -> None:
    for name in limits:
        if name not in LIMITS:
            hint = did_you_mean(name, LIMITS) or "the report's section Limits lists all"
            raise ValueError(f"unknown threshold {name!r} {place}: {hint}")
