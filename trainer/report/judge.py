"""The rules put to a run, each row measured, compared with its limit and told in its words; and the checklists."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name

from trainer.report.analysed_run import AnalysedRun, NotJudged, keys_of
from trainer.report.measures import Measure, limit_of, measured_by
from trainer.report.result import CheckItem, Finding
from trainer.report.rule_table import FindingRow, Rule, rules, table
from trainer.report.words import filled, reasons


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


def _judged(rule: Rule, run: AnalysedRun) -> Judged:
    measures: list[Measure] = []
    reason = ""
    try:
        for measure in _measured(rule, run):
            measures.append(measure)
    except NotJudged as lacking:
        reason = str(lacking)
    order = list(rule.rows)
    measures.sort(key=lambda measure: order.index(measure.row))
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
        yield from resolve_name(f"trainer.report.checks_{rule.check}")(run)
    by_itself = {key: row for key, row in rule.rows.items() if row.is_measured and row.is_of(run.profile)}
    present = {key: row for key, row in by_itself.items() if run.key(row.role or "") is not None}
    if by_itself and not present and not rule.check:
        names = dict.fromkeys(keys_of(row.role or "")[0] for row in by_itself.values())
        raise NotJudged(f"the log has no {' and no '.join(names)}")
    for key, row in present.items():
        yield from measured_by(row, key, run)


def _finding(rule: Rule, row: FindingRow, measure: Measure, run: AnalysedRun) -> Finding:
    metric = measure.metric or (run.name(row.role) if row.role else None)
    limit = measure.limit if measure.limit is not None else limit_of(row.limit, run)
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


def checklist(run: AnalysedRun, judged: Iterable[Judged]) -> tuple[CheckItem, ...]:
    """All fourteen lines. What is merely unusual, and no fault to its rule, is a note."""
    by_name = {one.rule.name: one for one in judged}
    return tuple(
        CheckItem(line["id"], line["phase"], line["text"], *_answer(run, line, by_name[line["rule"]]))
        for line in table()["checklist"]
    )


def _answer(run: AnalysedRun, line: Mapping[str, str], judged: Judged) -> tuple[str, str, str]:
    """(status, detail, remedy): what was measured, or the sentences of the rule that finds fault."""
    rows = judged.rule.rows
    measures = [measure for measure in judged.measures if rows[measure.row].id == rows[line["row"]].id]
    if not measures:
        return "unknown", judged.not_judged or line.get("untold", ""), ""
    measured = next((measure for measure in measures if measure.row == line["row"]), measures[0])
    faults = [measure for measure in measures if measure.is_fault and _is_of_phase(run, line["phase"], measure)]
    places = {measure.steps for measure in faults}
    told = [finding for finding in judged.findings if finding.steps in places]
    told = told or [*judged.findings][: len(faults)]  # of a fault that another row of its rule tells
    detail = " ".join(finding.title for finding in told)
    detail = detail or filled(line["in_order"], run, {"value": measured.value, **measured.words})
    if not faults:
        return "pass", detail, ""
    levels = {finding.level for finding in judged.findings}
    status = "fail" if levels & {"fail", "warn"} else "unknown" if levels == {"info"} else "note"
    return status, detail, " ".join(dict.fromkeys(finding.remedy for finding in told))


def _is_of_phase(run: AnalysedRun, phase: str, measure: Measure) -> bool:
    """Whether a fault counts in the first 100 steps: one that sets in later does not."""
    return phase != "start" or measure.steps is None or measure.steps[0] <= run.limits["first_steps"]
