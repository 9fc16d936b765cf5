"""What a rule is, and how all of them are put to a run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.result import LEVELS, Finding

Check = Callable[[AnalysedRun], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A line of the specification's table. `check` yields findings whose `id` holds only what tells two apart."""

    id: str
    name: str
    check: Check
    needs: tuple[str, ...] = ()
    """Roles without which it cannot be judged."""
    profiles: tuple[str, ...] = ()
    """Those it applies to; empty = all."""


def found(level: str, title: str, **fields: object) -> Finding:
    """A finding whose rule and id are filled in by `judge`."""
    return Finding(id=str(fields.pop("suffix", "")), rule="", level=level, title=title, **fields)  # type: ignore[arg-type]


def judge(run: AnalysedRun, rules: Sequence[Rule]) -> tuple[tuple[Finding, ...], tuple[tuple[str, str], ...]]:
    """(findings, worst first; rules that could not be judged, with the reason)."""
    findings: list[Finding] = []
    not_judged: list[tuple[str, str]] = []
    for rule in rules:
        if rule.profiles and run.profile not in rule.profiles:
            not_judged.append((rule.name, f"applies to {' and '.join(rule.profiles)} runs"))
            continue
        try:
            for role in rule.needs:
                run.get(role)
            findings += _named(rule, run)
        except NotJudged as reason:
            not_judged.append((rule.name, str(reason)))
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return tuple(findings), tuple(not_judged)


def _named(rule: Rule, run: AnalysedRun) -> Iterator[Finding]:
    for finding in rule.check(run):
        identity = f"{rule.name}:{finding.id}" if finding.id else rule.name
        yield replace(finding, id=identity, rule=rule.id)
