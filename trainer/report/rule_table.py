"""The table of rules as `rules.yaml` has it: rows with limit, level and words, and which limits a user may override."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from trainer.config import did_you_mean
from trainer.detection.watches import OVERFITTING


@dataclass(frozen=True)
class FindingRow:
    """A finding as the table has it. What it does not say it has from its rule."""

    title: str
    id: str = ""
    """What tells it from other findings of the rule; empty for the main one."""
    level: str = "warn"
    cause: str = ""
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    role: str | None = None
    limit: str | float | None = None
    """The limit that is told with it: a name, or the number itself."""
    statistic: str | None = None
    """Of `role`, compared with the limits `above`, `below` or the range `outside`."""
    points: str | float | None = None
    """At least so many points of `role`, `in_a_row` if asked, or a `share` of them lie beyond the limits."""
    shift: str | None = None
    """The level of `role` goes up or down to the end, to less (more) than `ratio` times what it was."""
    above: str | float | None = None
    below: str | float | None = None
    equal: str | float | None = None
    outside: tuple[str, ...] = ()
    times: str | None = None
    """The statistic that limits of points are multiples of."""
    in_a_row: bool = False
    share: str | None = None
    ratio: str | None = None
    value: str = "highest"
    """Which of the words about points, or about a shift, is the value told."""
    profiles: tuple[str, ...] = ()
    """Those that its points are looked at in; empty = those of the rule."""
    requires: tuple[str, ...] = ()
    """Conditions under which a statistic can be judged."""
    unless: tuple[str, ...] = ()
    """Rows of the rule beside which it is not told."""

    @property
    def is_measured(self) -> bool:
        """Whether it says itself what is measured of its role; else a function does."""
        return self.role is not None and not (self.statistic is None and self.points is None and self.shift is None)

    def is_of(self, profile: str) -> bool:
        return not self.profiles or profile in self.profiles


@dataclass(frozen=True)
class Rule:
    """A rule of the report: V01, V02, ..."""

    id: str
    name: str
    rows: Mapping[str, FindingRow]
    limits: Mapping[str, float] = field(default_factory=dict)
    check: str | None = None
    """The function that measures for the rows without a statistic."""
    needs: tuple[str, ...] = ()
    """Roles without which it cannot be judged."""
    profiles: tuple[str, ...] = ()
    """Those it applies to; empty = all."""


@cache
def table() -> Mapping[str, Any]:
    """The sections of `rules.yaml`: rules, roles, limits, checklist, options, advice."""
    text = files("trainer.report").joinpath("rules.yaml").read_text(encoding="utf-8")
    content: Mapping[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content


@cache
def rules() -> tuple[Rule, ...]:
    """In the order of their numbers."""
    return tuple(_rule(id_, entry) for id_, entry in table()["rules"].items())


def _rule(id_: str, entry: Mapping[str, Any]) -> Rule:
    own = {field.name: entry[field.name] for field in fields(Rule) if field.name in entry}
    common = {"role": next(iter(entry.get("needs", ())), None)}
    common |= {key: value for key, value in entry.items() if key not in own}
    given = {key: {"id": "" if key == "main" else key, **common, **row} for key, row in entry["rows"].items()}
    return Rule(**{**own, "id": id_, "rows": {key: FindingRow(**row) for key, row in given.items()}})


@cache
def default_limits() -> Mapping[str, float]:
    """Those of all rules, those that several share, and those that the guard judges by too."""
    limits = {**OVERFITTING, **table()["limits"]}
    for rule in rules():
        limits |= rule.limits
    return {name: float(limit) for name, limit in limits.items()}


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """All limits, those of `overrides` in place of the defaults. Raises `ValueError` for an unknown name."""
    _check_names(overrides or {}, "among the thresholds given")
    return {**default_limits(), **(overrides or {})}


def read_thresholds(path: Path) -> dict[str, float]:
    """Limits from a file of `name: number` lines; comments begin with #.

    Raises `ValueError` naming file and line for anything else, and for a name that no rule reads.
    """
    limits: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if content := line.split("#", 1)[0].strip():
            name, _, value = content.partition(":")
            try:
                limits[name.strip()] = float(value)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {content!r} is not `name: number`") from error
    _check_names(limits, f"in {path}")
    return limits


def _check_names(limits: Mapping[str, float], place: str) -> None:
    for name in limits:
        if name not in default_limits():
            hint = did_you_mean(name, default_limits()) or "trainer/report/rules.yaml lists all"
            raise ValueError(f"unknown threshold {name!r} {place}: {hint}")
