"""How checks are written: a function that looks at a run and yields what it found, in plain
sentences.

A check names the roles without which it cannot be judged, whose series it is given, and the
profiles it applies to. It yields findings (`fail`, `warn`, `note`, `info`) and lines of the
checklists that are in order. Of two findings of one id the first counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainer.report.advice import Advice
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.result import Finding


@dataclass(frozen=True)
class Told:
    """A finding, or that nothing was found; `line` is the one of the checklists that this
    answers.
    """

    finding: Finding | None
    line: str = ""
    detail: str = ""
    """What was measured where the line is in order."""


def in_order(line: str, detail: str) -> Told:
    return Told(None, line, detail)


def _told(
    level: str,
    title: str,
    *,
    id: str = "",
    metric: str | None = None,
    steps: tuple[int, int] | None = None,
    value: float | None = None,
    limit: float | None = None,
    evidence: Sequence[str] = (),
    cause: str = "",
    remedy: Sequence[Advice | str] | str = (),
    line: str = "",
    detail: str = "",
) -> Told:
    parts = [remedy] if isinstance(remedy, str) else remedy
    finding = Finding(
        id=id,
        rule="",
        level=level,
        title=title,
        metric=metric,
        steps=steps,
        value=None if value is None else float(value),
        threshold=None if limit is None else float(limit),
        evidence=tuple(filter(None, evidence)),
        cause=cause.strip(),
        remedy=" ".join(part.text if isinstance(part, Advice) else part for part in parts),
        reasons=tuple(part.why for part in parts if isinstance(part, Advice)),
    )
    return Told(finding, line, detail)


fail, warn, note, info = (partial(_told, level) for level in ("fail", "warn", "note", "info"))


@dataclass(frozen=True)
class Check:
    """A check of the report by its name, and by the number that its findings bear."""

    id: str
    name: str
    needs: tuple[str, ...]
    profiles: tuple[str, ...]
    function: Callable[..., Iterator[Told]]


CHECKS: dict[str, Check] = {}


def finding(
    name: str, id_: str, *needs: str, profile: Sequence[str] = ()
) -> Callable[[Callable[..., Iterator[Told]]], Callable[..., Iterator[Told]]]:
    """Declares a check, which is called with the run and the series of the roles that it needs."""

    def declared(function: Callable[..., Iterator[Told]]) -> Callable[..., Iterator[Told]]:
        CHECKS[name] = Check(id_, name, needs, tuple(profile), function)
        return function

    return declared


@dataclass(frozen=True)
class Judged:
    """What one check found."""

    check: Check
    told: tuple[Told, ...]
    not_judged: str = ""
    """Why not, or why no further."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        first: dict[str, Finding] = {}
        for one in self.told:
            if one.finding is not None:
                first.setdefault(one.finding.id, one.finding)
        return tuple(first.values())


def judged(check: Check, run: AnalysedRun) -> Judged:
    told: list[Told] = []
    reason = ""
    try:
        if check.profiles and run.profile not in check.profiles:
            raise NotJudged(f"applies to {' and '.join(check.profiles)} runs")
        for one in check.function(run, *(run.get(role) for role in check.needs)):
            told.append(
                one
                if one.finding is None
                else replace(one, finding=_named(check, one.finding, run))
            )
    except NotJudged as lacking:
        reason = str(lacking)
    return Judged(check, tuple(told), reason)


def _named(check: Check, found: Finding, run: AnalysedRun) -> Finding:
    """With the check's name and number, and the metric that it is about unless it says another."""
    metric = found.metric or (run.name(check.needs[0]) if check.needs else None)
    id_ = f"{check.name}:{found.id}" if found.id else check.name
    return replace(found, id=id_, rule=check.id, metric=metric)
