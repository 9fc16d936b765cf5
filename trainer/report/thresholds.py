"""The limits of all rules: defaults in `thresholds.yaml`, single ones overridden by a file or a mapping."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from trainer.config import did_you_mean


def read_thresholds(path: Path) -> dict[str, float]:
    """Limits from a file of `name: number` lines; comments begin with #.

    Raises `ValueError` naming file and line for anything else, and for a name that no rule reads.
    """
    limits = _parse(path.read_text(encoding="utf-8"), str(path))
    _check_names(limits, f"in {path}")
    return limits


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """All limits, those of `overrides` in place of the defaults. Raises `ValueError` for an unknown name."""
    overrides = overrides or {}
    _check_names(overrides, "among the thresholds given")
    return {**_defaults(), **overrides}


@cache
def _defaults() -> Mapping[str, float]:
    return _parse(files("trainer.report").joinpath("thresholds.yaml").read_text(encoding="utf-8"), "thresholds.yaml")


def _parse(text: str, source: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        name, _, value = content.partition(":")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {content!r} is not `name: number`") from error
    return limits


def _check_names(limits: Mapping[str, float], place: str) -> None:
    for name in limits:
        if name not in _defaults():
            hint = did_you_mean(name, _defaults()) or "trainer/report/thresholds.yaml lists all"
            raise ValueError(f"unknown threshold {name!r} {place}: {hint}")
