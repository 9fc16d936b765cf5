"""A check is a function that examines a run and yields findings, in plain sentences.

`@finding` names the roles and the profiles of a check. The function receives the series of these
roles, and does not run if one is missing. It yields `fail`, `warn`, `note` and `info` findings. A
check with one metric and one limit is a row of `bands.py` instead.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainer.tools.report.advice import REASONS, advise
from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.result import LEVELS, Finding

START_STEPS = 100
"""The first steps of a run, for trends and checklists."""
MAX_EVIDENCE = 10
Findings = Iterator[Finding]
Function = Callable[..., Findings]


def finding_of(
    level: str,
    title: str,
    *,
    reason: str = "none",
    id: str = "",
    cause: str = "",
    remedy: Any = (),
    **fields: Any,
) -> Finding:
    """Return a finding with the cause and the remedies of a reason, unless the caller gives others.
    The remedies still contain keys of `ADVICE`; `judge` resolves them.
    """
    usual_cause, *usual = REASONS[reason]
    cause = cause or usual_cause
    fields["remedy"] = remedy or usual
    return Finding(id, "", level, title, cause=cause, **fields)


fail, warn, note, info = (partial(finding_of, level) for level in LEVELS)


@dataclass(frozen=True)
class Check:
    """A function that judges runs by the metrics in `roles`.

    It applies to the runs with these profiles, or to all runs if `profiles` is empty.
    """

    name: str
    roles: tuple[str, ...]
    profiles: list[str]
    function: Function
    least: int = 1
    """The number of points that the check needs from each metric."""


def finding(
    name: str,
    *roles: str,
    profiles: str = "",
    least: int = 1,
) -> Callable[[Function], Check]:
    """Turn a function into a check. It is called with the run and the series of the roles."""
    return lambda function: Check(name, roles, profiles.split(), function, least)


def judge(run: AnalysedRun, checks: Iterable[Check]) -> tuple[list[Finding], dict[str, str]]:
    """Return all findings, and the reasons why checks could not judge, by check name."""
    found: list[Finding] = []
    unjudged: dict[str, str] = {}
    for check in checks:
        try:
            if check.profiles and run.profile not in check.profiles:
                raise NotJudged(f"applies to {' and '.join(check.profiles)} runs")
            series = [run.get(role, least=check.least) for role in check.roles]
            for one in check.function(run, *series):
                found.append(_complete(check, one, run))
        except NotJudged as lacking:
            unjudged.setdefault(check.name, str(lacking))
    return found, unjudged


def _complete(check: Check, found: Finding, run: AnalysedRun) -> Finding:
    """Fill in a finding's id, rule and metric, and the sentences of its remedy."""
    advice = [advise(run, name, found.begin) for name in found.remedy]
    return replace(
        found,
        id=f"{check.name}:{found.id}" if found.id else check.name,
        rule=check.name.partition(":")[0],
        metric=found.metric or (run.name(check.roles[0]) if check.roles else None),
        steps=found.steps and (int(found.steps[0]), int(found.steps[1])),
        evidence=tuple(filter(None, found.evidence)),
        cause=found.cause.strip(),
        remedy=" ".join(sentence for sentence, _ in advice),
        reasons=tuple(why for _, why in advice if why),
    )
