"""The rules put to a run, each row measured, compared with its limit and told in its words; and the checklists."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged, keys_of, recognise_profile
from trainer.report.measures import Measure, limit_of, measured_by
from trainer.report.readers.json_logs import read_own
from trainer.report.result import CheckItem, Finding
from trainer.report.rule_table import FindingRow, Rule, default_limits, rules, table
from trainer.report.words import filled, reasons
from trainer.runtime.json_lines import JsonLines


@dataclass(frozen=True)
class Judged:
    """What one rule measured and found."""

    rule: Rule
    measures: tuple[Measure, ...]
    """Of faults and of what is in order."""
    findings: tuple[Finding, ...]
    not_judged: str = ""
    """Why not, or why no further."""


def judge(run: AnalysedRun, names: Collection[str] | None = None) -> tuple[Judged, ...]:
    """The rules of these names, else all of the table, in its order."""
    return tuple(_judged(rule, run) for rule in rules() if names is None or rule.name in names)


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


_TRAINED = re.compile(rb'\{"step":(\d+),"attempt":\d+,"kind":"train"')


class Standing:
    """That of our own run under way, put again and again.

    Reads of `metrics.jsonl` what was added since the last time, and keeps of it the first steps and what is not of
    training: a million rows cost a look at how each begins.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._added = JsonLines(path, is_wanted=_is_looked_at)
        self._rows: list[Mapping[str, Any]] = []

    @np.errstate(all="ignore")
    def lines(self, phase: str) -> tuple[CheckItem, ...]:
        """Of a phase: "start", after the first steps, or "checkpoint"."""
        self._rows += [row for _, row in self._added]
        log = read_own(self._path, (row for row in self._rows if phase != "start" or _is_first(row.get("step"))))
        run = AnalysedRun(log, recognise_profile(log), default_limits())
        wanted = [line for line in table()["checklist"] if line["phase"] == phase]
        return _answered(run, judge(run, {line["rule"] for line in wanted}), wanted)


def _is_looked_at(line: bytes) -> bool:
    trained = _TRAINED.match(line)
    return trained is None or _is_first(int(trained[1]))


def _is_first(step: Any) -> bool:
    return isinstance(step, int) and step <= default_limits()["first_steps"]


def checklist(run: AnalysedRun, judged: Iterable[Judged]) -> tuple[CheckItem, ...]:
    """All fourteen lines. What is merely unusual, and no fault to its rule, is a note."""
    return _answered(run, judged, table()["checklist"])


def _answered(run: AnalysedRun, judged: Iterable[Judged], lines: Iterable[Mapping[str, str]]) -> tuple[CheckItem, ...]:
    by_name = {one.rule.name: one for one in judged}
    return tuple(
        CheckItem(line["id"], line["phase"], line["text"], *_answer(run, line, by_name[line["rule"]])) for line in lines
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
