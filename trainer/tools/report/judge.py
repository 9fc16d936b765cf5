"""All checks, the order of what they find, and the checklists that they answer."""

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from trainer.tools.report import (
    checks_bands,
    checks_curves,
    checks_policy,
    checks_run,
    checks_speed,
    checks_validation,
)
from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.checks import START_STEPS, Check
from trainer.tools.report.formatting import number
from trainer.tools.report.result import LEVELS, CheckItem, Finding

ROOMS = (checks_curves, checks_policy, checks_run, checks_speed, checks_validation)
CHECKS: tuple[Check, ...] = (
    *checks_bands.CHECKS,
    *(one for room in ROOMS for one in vars(room).values() if isinstance(one, Check)),
)
TRAINING = """
    serving oom_nccl truncation:empty restarts lr_schedule adv_shape value_network kl
    clipped_ratio length_shift entropy_collapse reward_hacking loss_zero not_learning
    loss_nonfinite loss_diverging loss_oscillating grad_high:sustained grad_vanish
    overfit val_rising reward_trend accuracy val_results budget val_leak
"""
"""Ids of findings, or what they begin with, from what enters an update to its results: of findings
that set in together each may cause those after it.
"""
LESSER = """
    grad_unclipped loss_spike grad_high lr_too_high reward_drop
    data_bound memory time_high time_growth gpu_util
"""
"""The same for bursts, which pass, and for the speed of a run: they come after what lasts."""
CHAIN = tuple(f"{TRAINING} {LESSER}".split())
ENDS = (len(TRAINING.split()), len(CHAIN))


class Line(NamedTuple):
    """A line of the checklists: it fails where its check finds something."""

    id: str
    phase: str
    check: str
    """The id of a finding, or what it begins with."""
    text: str
    role: str = ""
    """The metric whose course is told where the line passes."""


LINES = (
    Line("loss_falls", "start", "loss_not_falling", "The training loss falls", "loss"),
    Line("rate_rises", "start", "lr_schedule:warmup", "The learning rate rises in its warm-up", "lr"),
    Line("gradient_in_range", "start", "grad_range", "The gradient norm is between 0.1 and 10", "grad"),
    Line("time_stable", "start", "time_growth", "The step time is stable", "time"),
    Line("device_busy", "start", "gpu_util", "The devices are busy more than 80 % of the time",
         "gpu_util"),
    Line("no_crash", "start", "oom_nccl", "No NCCL timeout, not out of memory"),
    Line("val_not_rising", "checkpoint", "val_rising", "The validation loss does not keep rising",
         "val_loss"),
    Line("checkpoints_whole", "checkpoint", "ckpt_complete:step",
         "All files are there, the export among them"),
    Line("checkpoint_sizes", "checkpoint", "ckpt_complete:size", "Sizes are plausible"),
    Line("tracker_file", "checkpoint", "ckpt_complete:tracker", "The tracker file names the newest"),
    Line("all_steps", "end", "run_complete:steps", "All planned steps were trained"),
    Line("final_loss", "end", "loss_final", "The final training loss is in the usual range", "loss"),
    Line("all_checkpoints", "end", "ckpt_complete:missing", "All expected checkpoints were saved"),
    Line("finished", "end", "run_complete:exit", "The run ended as finished"),
)  # fmt: skip


def ordered(found: Iterable[Finding], *, slack: int) -> tuple[Finding, ...]:
    """Return findings by level, a cause before its effects. Of those with one id the worst counts.

    The one that sets in first is the cause; of those that set in within `slack` steps, the one
    that stands first in `CHAIN`. A cause in training is as bad as the worst of its effects.
    """
    worst: dict[str, Finding] = {}
    for one in sorted(found, key=lambda one: LEVELS.index(one.level)):
        worst.setdefault(one.id, one)
    fatal = [one for one in worst.values() if one.level == "fail"]
    for cause in worst.values():
        if cause.level == "warn" and any(_explains(cause, effect, slack) for effect in fatal):
            worst[cause.id] = replace(cause, level="fail")
    together, begin = {}, -slack - 1
    for one in sorted(worst.values(), key=_begin):
        begin = _begin(one) if _begin(one) > begin + slack else begin
        together[one.id] = begin

    def key(one: Finding) -> tuple[int, ...]:
        weight = bisect(ENDS, _rank(one))
        return LEVELS.index(one.level), weight, together[one.id], _rank(one), _begin(one)

    return tuple(sorted(worst.values(), key=key))


def _begin(one: Finding) -> int:
    return one.steps[0] if one.steps else 0


def _rank(one: Finding) -> int:
    places = (place for place, name in enumerate(CHAIN) if one.id.startswith(name))
    return next(places, len(CHAIN))


def _explains(cause: Finding, effect: Finding, slack: int) -> bool:
    """Return whether a fault of training precedes an effect, and still lasts where that begins."""
    first, last = cause.steps or (0, 0)
    is_known = _rank(cause) < _rank(effect) < ENDS[0]
    return is_known and first - slack <= _begin(effect) <= last + slack


def checklist(
    run: AnalysedRun, findings: Iterable[Finding], unjudged: Mapping[str, str]
) -> tuple[CheckItem, ...]:
    """Return all lines. What is merely unusual, and no fault to its check, is a note."""
    everything = tuple(findings)
    return tuple(
        CheckItem(line.id, line.phase, line.text, *_answer(run, line, everything, unjudged))
        for line in LINES
    )


def _answer(
    run: AnalysedRun, line: Line, findings: Iterable[Finding], unjudged: Mapping[str, str]
) -> tuple[str, str, str]:
    """Return status, detail and remedy: the course of the metric, or what was found."""
    # what sets in later is no fault of the start
    last = START_STEPS if line.phase == "start" else run.last_step
    faults = [one for one in findings if one.id.startswith(line.check) and _begin(one) <= last]
    if faults:
        levels = {fault.level for fault in faults}
        status = "fail" if levels & {"fail", "warn"} else "note" if "note" in levels else "unknown"
        detail = " ".join(fault.title for fault in faults)
        return status, detail, " ".join(dict.fromkeys(fault.remedy for fault in faults))
    reason = unjudged.get(line.check) or unjudged.get(line.check.partition(":")[0])
    if reason:
        return "unknown", reason, ""
    if not line.role:
        return "pass", "nothing found", ""
    values = run.get(line.role).values
    return "pass", f"{number(values[0])} to {number(values[-1])}", ""
