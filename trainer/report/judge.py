"""The checks put to a run, the order of what they find, and the checklists that they answer."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from trainer.report import checks_curves, checks_policy, checks_run, checks_speed, checks_validation
from trainer.report.analysed_run import AnalysedRun
from trainer.report.checks import CHECKS, START_STEPS, Judged, judged
from trainer.report.formatting import number
from trainer.report.learning_rate import learning_rate
from trainer.report.result import LEVELS, CheckItem, Finding

ROOMS = (checks_curves, checks_policy, checks_run, checks_speed, checks_validation)
"""Importing them declares their checks."""
CAUSES = (
    *("serving", "oom_nccl", "truncation:empty", "loss_zero", "not_learning", "adv_shape"),
    *("restarts", "lr_schedule:raised", "lr_schedule", "value_network", "kl", "clipped_ratio"),
    *("length_shift", "entropy_collapse", "grad_unclipped", "reward_hacking"),
    *("grad_high", "grad_vanish", "loss_nonfinite", "loss_diverging", "loss_spike"),
    *(
        "loss_oscillating",
        "lr_too_high",
        "overfit",
        "val_rising",
        "reward_drop",
        "reward_trend",
        "accuracy",
    ),
    *("val_results", "budget", "data_bound", "memory", "time_high", "time_growth", "gpu_util"),
)
"""Ids of findings, or what they begin with, in the order in which one is known to cause the next."""
EFFECTS: Mapping[str, str] = {
    "data_bound": "time_high time_growth gpu_util",
    "memory": "oom_nccl time_growth",
    "time_growth": "gpu_util",
}
"""Causes that explain some effects alone; those of training explain all that follow them."""
NUM_TRAINING = CAUSES.index("budget") + 1


class Line(NamedTuple):
    """A line of the checklists: it fails where one of its checks finds something."""

    id: str
    phase: str
    checks: tuple[str, ...]
    """Ids of findings, or what they begin with."""
    text: str
    role: str = ""
    """The metric whose course is told where the line passes."""
    unknown: Callable[[AnalysedRun], str] = lambda _: ""
    """Why the log does not tell."""


def _no_warmup(run: AnalysedRun) -> str:
    rates = run.get("lr")
    told = learning_rate(rates, (), total_steps=run.total_steps)
    return "" if told.warmup_steps else "there was no warm-up"


LINES = (
    Line("loss_falls", "start", ("loss_not_falling",), "The training loss falls", "loss"),
    Line("rate_rises", "start", ("lr_schedule:warmup",), "The learning rate rises in its warm-up",
         "lr", _no_warmup),
    Line("gradient_in_range", "start", ("grad_range",), "The gradient norm is between 0.1 and 10",
         "grad"),
    Line("time_stable", "start", ("time_growth",), "The step time is stable", "time"),
    Line("device_busy", "start", ("gpu_util",), "The devices are busy more than 80 % of the time",
         "gpu_util"),
    Line("no_crash", "start", ("oom_nccl",), "No NCCL timeout, not out of memory",
         unknown=lambda run: "" if run.log.events else "the log has no events"),
    Line("val_not_rising", "checkpoint", ("val_rising",),
         "The validation loss does not keep rising", "val_loss"),
    Line("checkpoints_whole", "checkpoint", ("ckpt_complete:step",),
         "All files are there, the export among them"),
    Line("checkpoint_sizes", "checkpoint", ("ckpt_complete:size",), "Sizes are plausible"),
    Line("tracker_file", "checkpoint", ("ckpt_complete:tracker",),
         "The tracker file names the newest",
         unknown=lambda run: "there is no tracker file" if run.log.tracker_step is None else ""),
    Line("all_steps", "end", ("run_complete:steps",), "All planned steps were trained",
         unknown=lambda run: "" if run.log.total_steps
         else "the planned number of steps is not known"),
    Line("final_loss", "end", ("loss_final",), "The final training loss is in the usual range",
         "loss"),
    Line("all_checkpoints", "end", ("ckpt_complete:missing",),
         "All expected checkpoints were saved",
         unknown=lambda run: "" if run.cadences else "how often to save is not known"),
    Line("finished", "end", ("run_complete:exit",), "The run ended as finished",
         unknown=lambda run: "no end was written" if run.log.exit_code is None else ""),
)  # fmt: skip


def judge(run: AnalysedRun) -> tuple[Judged, ...]:
    return tuple(judged(check, run) for check in CHECKS)


def ordered(found: Iterable[Finding], *, slack: int) -> tuple[Finding, ...]:
    """Return findings by level, a cause before its effects.

    A finding explains those after it in `CAUSES` that do not begin more than `slack` steps before
    it, and is as bad as the worst of them.
    """
    worst: dict[str, Finding] = {}
    for one in sorted(found, key=lambda one: LEVELS.index(one.level)):
        worst.setdefault(one.id, one)
    findings = [_weighed(one, worst.values(), slack) for one in worst.values()]

    def key(one: Finding) -> tuple[int, int, int]:
        first = one.steps[0] if one.steps else sys.maxsize
        return LEVELS.index(one.level), _rank(one), first

    return tuple(sorted(findings, key=key))


def _weighed(one: Finding, others: Iterable[Finding], slack: int) -> Finding:
    """Return a finding that is as bad as the worst effect that it explains."""
    if one.level != "warn":
        return one
    is_fatal = any(other.level == "fail" and _explains(one, other, slack) for other in others)
    return replace(one, level="fail") if is_fatal else one


def _rank(one: Finding) -> int:
    places = (place for place, name in enumerate(CAUSES) if one.id.startswith(name))
    return next(places, len(CAUSES))


def _explains(cause: Finding, effect: Finding, slack: int) -> bool:
    name = cause.id.partition(":")[0]
    is_known = _rank(cause) < _rank(effect) < NUM_TRAINING
    if name in EFFECTS:
        is_known = effect.id.startswith(tuple(EFFECTS[name].split()))
    begins = [one.steps[0] if one.steps else 0 for one in (cause, effect)]
    return is_known and begins[0] <= begins[1] + slack


def checklist(run: AnalysedRun, all_judged: Iterable[Judged]) -> tuple[CheckItem, ...]:
    """Return all lines. What is merely unusual, and no fault to its check, is a note."""
    everything = tuple(all_judged)
    judged_by_name = {one.check.name: one for one in reversed(everything)}
    found = [finding for one in everything for finding in one.findings]
    return tuple(
        CheckItem(line.id, line.phase, line.text, *_answer(run, line, judged_by_name, found))
        for line in LINES
    )


def _answer(
    run: AnalysedRun, line: Line, by_name: Mapping[str, Judged], found: list[Finding]
) -> tuple[str, str, str]:
    """Return status, detail and remedy: the course of the metric, or what was found."""
    faults = [one for one in found if one.id.startswith(line.checks) and _is_of(line.phase, one)]
    if faults:
        levels = {fault.level for fault in faults}
        status = "fail" if levels & {"fail", "warn"} else "note" if "note" in levels else "unknown"
        detail = " ".join(fault.title for fault in faults)
        return status, detail, " ".join(dict.fromkeys(fault.remedy for fault in faults))
    check = by_name[line.checks[0].partition(":")[0]]
    if reason := check.not_judged or line.unknown(run):
        return "unknown", reason, ""
    if not line.role:
        return "pass", "nothing found", ""
    values = run.get(line.role).values
    return "pass", f"{number(values[0])} to {number(values[-1])}", ""


def _is_of(phase: str, fault: Finding) -> bool:
    """Return whether a fault counts in its phase: one that sets in later is none of the start."""
    return phase != "start" or fault.steps is None or fault.steps[0] <= START_STEPS
