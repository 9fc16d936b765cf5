"""All checks, the order of what they find, and the checklists that they answer."""

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import replace

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
from trainer.tools.report.names import rows_of
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
    overfit val_rising reward_trend accuracy:collapse accuracy val_results budget:rising budget
    val_leak
"""
"""Ids of findings, or their beginnings, from what enters an update to its results: of findings that
begin together each may cause those after it.
"""
LESSER = """
    loss_spike grad_high lr_too_high reward_drop
    data_bound memory time_high time_growth gpu_util
"""
"""The same for bursts, which pass, and for the speed of a run: they come after what lasts."""
CHAIN = tuple(f"{TRAINING} {LESSER}".split())
ENDS = (len(TRAINING.split()), len(CHAIN))


_LINES = """
# id              | phase      | check                 | role     | text
loss_falls        | start      | loss_not_falling      | loss     | The training loss falls
rate_rises        | start      | lr_schedule:warmup    | lr       | The learning rate rises in its warm-up
gradient_in_range | start      | grad_range            | grad     | The gradient norm is between 0.1 and 10
time_stable       | start      | time_growth           | time     | The step time is stable
device_busy       | start      | gpu_util              | gpu_util | The devices are busy more than 80 % of the time
no_crash          | start      | oom_nccl              |          | No NCCL timeout, not out of memory
val_not_rising    | checkpoint | val_rising            | val_loss | The validation loss does not keep rising
checkpoints_whole | checkpoint | ckpt_complete:step    |          | All files are there, the export among them
all_steps         | end        | run_complete:steps    |          | All planned steps were trained
final_loss        | end        | loss_final            | loss     | The final training loss is in the usual range
all_checkpoints   | end        | ckpt_complete:missing |          | All expected checkpoints were saved
finished          | end        | run_complete:exit     |          | The run ended as finished
"""
"""A line fails where its check, an id of a finding or its beginning, finds something; where it
passes, it tells the course of the metric.
"""
STATUS = {"fail": "fail", "warn": "fail", "note": "note", "info": "unknown"}
"""Level of the worst finding -> status of a line: what is merely unusual is a note."""


def ordered(found: Iterable[Finding], *, slack: int) -> tuple[Finding, ...]:
    """Return findings by level, a cause before its effects. Of those with one id the worst counts.

    The one that begins first is the cause; of those that begin within `slack` steps, the one that
    comes first in `CHAIN`. A cause in training is as bad as the worst of its effects.
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
    """Return the first step of a finding; 0 without one."""
    return one.steps[0] if one.steps else 0


def _rank(one: Finding) -> int:
    """Return the place of a finding in `CHAIN`."""
    places = (place for place, name in enumerate(CHAIN) if one.id.startswith(name))
    return next(places, len(CHAIN))


def _explains(cause: Finding, effect: Finding, slack: int) -> bool:
    """Return whether a fault of training precedes an effect, and still lasts where that begins."""
    first, last = cause.steps or (0, 0)
    is_known = _rank(cause) < _rank(effect) < ENDS[0]
    return is_known and first - slack <= _begin(effect) <= last + slack


def checklist(
    run: AnalysedRun, findings: tuple[Finding, ...], unjudged: Mapping[str, str]
) -> tuple[CheckItem, ...]:
    """Return all lines with their answers."""
    items = []
    for id_, phase, check, role, text in rows_of(_LINES):
        # what begins later is no fault of the start
        last = START_STEPS if phase == "start" else run.last_step
        faults = [one for one in findings if one.id.startswith(check) and _begin(one) <= last]
        reason = unjudged.get(check) or unjudged.get(check.partition(":")[0])
        if faults:  # the worst first
            status, detail = STATUS[faults[0].level], " ".join(fault.title for fault in faults)
        elif reason:
            status, detail = "unknown", reason
        else:
            status, detail = "pass", "nothing found"
            if role:
                values = run.get(role).values
                detail = f"{number(values[0])} to {number(values[-1])}"
        items.append(CheckItem(id_, phase, text, status, detail))
    return tuple(items)
