"""The checks put to a run, and the lines of the checklists that they answer."""

from collections.abc import Iterable
from typing import NamedTuple

from trainer.report import checks_curves, checks_policy, checks_run, checks_speed, checks_validation
from trainer.report.analysed_run import AnalysedRun
from trainer.report.checks import CHECKS, Judged, Told, judged
from trainer.report.result import CheckItem

ROOMS = (checks_curves, checks_policy, checks_run, checks_speed, checks_validation)
"""Importing them declares their checks."""


class Line(NamedTuple):
    """A line of the checklists, answered by a check."""

    id: str
    phase: str
    check: str
    text: str
    untold: str = ""
    """What is said where the log does not tell."""


LINES = (
    Line(
        "loss_falls",
        "start",
        "loss_not_falling",
        "The training loss falls",
        "too few losses in the first steps",
    ),
    Line(
        "rate_rises",
        "start",
        "lr_schedule",
        "The learning rate rises in its warm-up",
        "there was no warm-up",
    ),
    Line("gradient_in_range", "start", "grad_range", "The gradient norm is between 0.1 and 10"),
    Line(
        "time_stable",
        "start",
        "time_growth",
        "The step time is stable",
        "too few step times in the first steps",
    ),
    Line("device_busy", "start", "gpu_util", "The devices are busy more than 80 % of the time"),
    Line(
        "no_crash",
        "start",
        "oom_nccl",
        "No NCCL timeout, not out of memory",
        "the log has no events",
    ),
    Line("val_not_rising", "checkpoint", "val_rising", "The validation loss does not keep rising"),
    Line(
        "checkpoints_whole",
        "checkpoint",
        "ckpt_complete",
        "All files are there, the export among them",
    ),
    Line("checkpoint_sizes", "checkpoint", "ckpt_complete", "Sizes are plausible"),
    Line(
        "tracker_file",
        "checkpoint",
        "ckpt_complete",
        "The tracker file names the newest",
        "there is no tracker file",
    ),
    Line(
        "all_steps",
        "end",
        "run_complete",
        "All planned steps were trained",
        "the planned number of steps is not known",
    ),
    Line("final_loss", "end", "loss_final", "The final training loss is in the usual range"),
    Line(
        "all_checkpoints",
        "end",
        "ckpt_complete",
        "All expected checkpoints were saved",
        "how often to save is not known",
    ),
    Line("finished", "end", "run_complete", "The run ended as finished", "no end was written"),
)


def judge(run: AnalysedRun) -> tuple[Judged, ...]:
    """All checks, in the order of their numbers."""
    return tuple(
        judged(check, run) for check in sorted(CHECKS.values(), key=lambda check: check.id)
    )


def checklist(run: AnalysedRun, all_judged: Iterable[Judged]) -> tuple[CheckItem, ...]:
    """All fourteen lines. What is merely unusual, and no fault to its check, is a note."""
    by_name = {one.check.name: one for one in all_judged}
    return tuple(
        CheckItem(line.id, line.phase, line.text, *_answer(run, line, by_name[line.check]))
        for line in LINES
    )


def _answer(run: AnalysedRun, line: Line, one: Judged) -> tuple[str, str, str]:
    """(status, detail, remedy): what was measured, or the sentences of the findings."""
    answers = [told for told in one.told if told.line == line.id]
    if not answers:
        return "unknown", one.not_judged or line.untold, ""
    faults = [
        told.finding
        for told in answers
        if told.finding is not None and _is_of_phase(run, line.phase, told)
    ]
    if not faults:
        return "pass", next((told.detail for told in answers if told.detail), ""), ""
    levels = {fault.level for fault in faults}
    status = "fail" if levels & {"fail", "warn"} else "unknown" if levels == {"info"} else "note"
    detail = " ".join(fault.title for fault in faults)
    return status, detail, " ".join(dict.fromkeys(fault.remedy for fault in faults))


def _is_of_phase(run: AnalysedRun, phase: str, told: Told) -> bool:
    """Whether a fault counts in the first 100 steps: one that sets in later does not."""
    steps = told.finding.steps if told.finding else None
    return phase != "start" or steps is None or steps[0] <= run.limits["first_steps"]
