"""The rules put to a run: each row of the table is measured, compared with its limit and told in its words."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainer.report import checks_gradient, checks_loss, checks_policy, checks_run, checks_speed, checks_validation
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.measure import PLACES, STATISTICS, Measure
from trainer.report.result import LEVELS, Finding
from trainer.report.rule_table import FindingRow, Rule, rules
from trainer.report.vocabulary import ROLES
from trainer.report.words import filled, reasons

Check = Callable[[AnalysedRun], Iterable[Measure]]
ROOMS = {
    "loss": checks_loss,
    "gradient": checks_gradient,
    "validation": checks_validation,
    "speed": checks_speed,
    "run": checks_run,
    "policy": checks_policy,
}
"""Where the functions are that the table names: `loss.falling` is `checks_loss.falling`."""


def find_check(name: str) -> Check:
    """Raises `KeyError` or `AttributeError` for a name that the table should not hold."""
    room, _, function = name.partition(".")
    check: Check = getattr(ROOMS[room], function)
    return check


@dataclass(frozen=True)
class Judged:
    """What one rule measured and found."""

    rule: Rule
    measures: tuple[Measure, ...]
    """Of faults and of what is in order."""
    findings: tuple[Finding, ...]
    not_judged: str = ""
    """Why not, or why no further."""


def judge(run: AnalysedRun) -> tuple[Judged, ...]:
    """All rules of the table, in its order."""
    return tuple(_judged(rule, run) for rule in rules())


def worst_first(judged: Iterable[Judged]) -> tuple[Finding, ...]:
    findings = [finding for one in judged for finding in one.findings]
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def _judged(rule: Rule, run: AnalysedRun) -> Judged:
    measures: list[Measure] = []
    reason = ""
    try:
        for measure in _measured(rule, run):
            measures.append(measure)
    except NotJudged as lacking:
        reason = str(lacking)
    faults = {measure.row for measure in measures if measure.is_fault}
    findings: dict[str, Finding] = {}
    for measure in measures:
        row = rule.rows[measure.row]
        if measure.is_fault and not faults & set(row.unless):
            finding = _finding(rule, row, measure, run)
            findings.setdefault(finding.id, finding)
    return Judged(rule, tuple(measures), tuple(findings.values()), reason)


def _measured(rule: Rule, run: AnalysedRun) -> Iterator[Measure]:
    if rule.profiles and run.profile not in rule.profiles:
        raise NotJudged(f"applies to {' and '.join(rule.profiles)} runs")
    for role in rule.needs:
        run.get(role)
    if rule.check:
        yield from find_check(rule.check)(run)
    compared = [(key, row, row.role) for key, row in rule.rows.items() if row.statistic and row.role]
    present = [(key, row, role) for key, row, role in compared if run.find(role) is not None]
    if compared and not present and not rule.check:
        raise NotJudged(f"the log has no {' and no '.join(dict.fromkeys(ROLES[role][0] for *_, role in compared))}")
    for key, row, role in present:
        yield _compared(key, row, run, role)


def _compared(key: str, row: FindingRow, run: AnalysedRun, role: str) -> Measure:
    """A statistic of a role against its limits."""
    series, name = run.get(role), row.statistic or ""
    if "from_the_start" in row.requires and series.steps[0] > run.limits["first_steps"]:
        raise NotJudged(f"the log begins at step {series.steps[0]}")
    if "pretrained" in row.requires:
        run.require_pretrained()
    value, steps = STATISTICS[name](series), None
    if name in PLACES:
        at = series.steps[PLACES[name]]
        steps = int(at[0]), int(at[-1])
    low, high = (_limit(limit, run) for limit in (row.outside or (row.below, row.above)))
    is_low, is_high = low is not None and value < low, high is not None and value > high
    return Measure(
        key, value, steps, {"low": low, "high": high}, limit=low if is_low else high, is_fault=is_low or is_high
    )


def _limit(name: str | float | None, run: AnalysedRun) -> float | None:
    """By its name, with a minus for its negative; or the number itself."""
    if isinstance(name, str):
        return -run.limits[name[1:]] if name.startswith("-") else run.limits[name]
    return None if name is None else float(name)


def _finding(rule: Rule, row: FindingRow, measure: Measure, run: AnalysedRun) -> Finding:
    metric = measure.metric or (run.name(row.role) if row.role else None)
    limit = measure.limit if measure.limit is not None else _limit(row.limit, run)
    words = {"value": measure.value, "limit": limit, "metric": metric, "steps": measure.steps, **measure.words}
    suffix, title, cause, remedy, *evidence = (
        filled(sentence, run, words, row.role) for sentence in (row.id, row.title, row.cause, row.remedy, *row.evidence)
    )
    return Finding(
        id=f"{rule.name}:{suffix}" if suffix else rule.name,
        rule=rule.id,
        level=row.level,
        title=title,
        metric=metric,
        steps=measure.steps,
        value=measure.value,
        threshold=limit,
        evidence=(*measure.evidence, *filter(None, evidence)),
        cause=cause,
        remedy=remedy,
        reasons=reasons(row.remedy),
    )
