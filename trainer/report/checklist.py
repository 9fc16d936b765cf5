"""The checklists of a run, as its rules answer them: first 100 steps, each checkpoint, the end."""

from collections.abc import Iterable, Mapping

from trainer.report.analysed_run import AnalysedRun
from trainer.report.judge import Judged
from trainer.report.measure import Measure
from trainer.report.result import CheckItem
from trainer.report.rule_table import table
from trainer.report.words import filled


def checklist(run: AnalysedRun, judged: Iterable[Judged]) -> tuple[CheckItem, ...]:
    """All fourteen lines. What is merely unusual, and no fault to its rule, is a note."""
    by_name = {one.rule.name: one for one in judged}
    return tuple(
        CheckItem(line["id"], line["phase"], line["text"], *_answer(run, line, by_name[line["rule"]]))
        for line in table()["checklist"]
    )


def _answer(run: AnalysedRun, line: Mapping[str, str], judged: Judged) -> tuple[str, str]:
    """(status, detail): what was measured, or the sentence of the rule that finds fault."""
    rows = judged.rule.rows
    measures = [measure for measure in judged.measures if rows[measure.row].id == rows[line["row"]].id]
    if not measures:
        return "unknown", judged.not_judged or line.get("untold", "")
    measured = next((measure for measure in measures if measure.row == line["row"]), measures[0])
    faults = [measure for measure in measures if measure.is_fault and _is_of_phase(run, line["phase"], measure)]
    places = {measure.steps for measure in faults}
    titles = [finding.title for finding in judged.findings if finding.steps in places]
    detail = " ".join(titles) or filled(line["in_order"], run, {"value": measured.value, **measured.words})
    if not faults:
        return "pass", detail
    levels = {finding.level for finding in judged.findings}
    return "fail" if levels & {"fail", "warn"} else "unknown" if levels == {"info"} else "note", detail


def _is_of_phase(run: AnalysedRun, phase: str, measure: Measure) -> bool:
    """Whether a fault counts in the first 100 steps: one that sets in later does not."""
    return phase != "start" or measure.steps is None or measure.steps[0] <= run.limits["first_steps"]
