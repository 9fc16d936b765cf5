"""Collects all checks, sorts their findings, and fills in the checklists."""

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
    serving oom_nccl truncation:empty restarts lr_schedule loss_nonfinite adv_shape value_network
    kl clip_ratio clipped_ratio length_shift entropy reward_hacking loss_zero
    not_learning loss_diverging loss_oscillating
    grad_high:rise loss_jump grad_high:sustained grad_vanish
    overfit val_rising budget:rising reward_trend accuracy:collapse accuracy val_results budget
    val_leak
"""
"""Ids of findings, or prefixes of ids, from the inputs of an update to its results. Among findings
that begin together, an earlier one may cause the later ones.
"""
LESSER = """
    loss_spike grad_high lr_too_high reward_drop
    data_bound memory time_growth time_high gpu_util
"""
"""Ids or prefixes of findings about bursts and speed. They come after the lasting problems in
`TRAINING`.
"""
CHAIN = tuple(f"{TRAINING} {LESSER}".split())
ENDS = (len(TRAINING.split()), len(CHAIN))


_LINES = """
# id              | phase      | check                 | role     | text
loss_falls        | start      | loss_not_falling      | loss     | The training loss falls
rate_rises        | start      | lr_schedule:warmup    | lr       | The learning rate rises in its warm-up
gradient_in_range | start      | grad_range            | grad     | The gradient norm is between 0.1 and 10
time_stable       | start      | time_growth           | time     | The step time is stable
device_busy       | start      | gpu_util              | gpu_util | The devices are busy over 80 % of the time
no_crash          | start      | oom_nccl              |          | No NCCL timeout and no OOM
val_not_rising    | checkpoint | val_rising            | val_loss | The validation loss does not keep rising
checkpoints_whole | checkpoint | ckpt_complete:step    |          | All files exist, including the export
all_steps         | end        | run_complete:steps    |          | All planned steps were trained
final_loss        | end        | loss_final            | loss     | The final training loss is in the usual range
all_checkpoints   | end        | ckpt_complete:missing |          | All expected checkpoints were saved
finished          | end        | run_complete:exit     |          | The run finished normally
"""
"""The lines of the checklists. The column `check` holds the id of a finding or a prefix of it. A
line fails if there is such a finding. If it passes, it shows the metric's first and last value.
"""
STATUS = {"fail": "fail", "warn": "fail", "note": "note", "info": "unknown"}
"""Level of the worst finding -> status of a checklist line. A merely unusual value is a note."""


def ordered(found: Iterable[Finding], *, slack: int) -> tuple[Finding, ...]:
    """Sort findings by level, and put each cause before its effects.

    Of several findings with the same id, only the worst counts, or the first if they are equally
    bad. The finding that begins first is the cause. If several begin within `slack` steps of each
    other, the cause is the one that comes first in `CHAIN`. A warning that explains a fatal finding
    becomes fatal too.
    """
    worst: dict[str, Finding] = {}
    for one in sorted(found, key=lambda one: LEVELS.index(one.level)):
        worst.setdefault(one.id, one)
    fatal = [one for one in worst.values() if one.level == "fail"]
    for cause in worst.values():
        if cause.level == "warn" and any(_explains(cause, effect, slack) for effect in fatal):
            worst[cause.id] = replace(cause, level="fail")
    together = {}
    begin = -slack - 1
    for one in sorted(worst.values(), key=lambda one: one.begin):
        if one.begin > begin + slack:
            begin = one.begin
        together[one.id] = begin

    def key(one: Finding) -> tuple[int, ...]:
        weight = bisect(ENDS, _rank(one))
        return LEVELS.index(one.level), weight, together[one.id], _rank(one), one.begin

    return tuple(sorted(worst.values(), key=key))


def _rank(one: Finding) -> int:
    """Return the position of a finding in `CHAIN`, or the length of `CHAIN` if it is missing there."""
    places = (place for place, name in enumerate(CHAIN) if one.id.startswith(name))
    return next(places, len(CHAIN))


def _explains(cause: Finding, effect: Finding, slack: int) -> bool:
    """Return True if one fault in `TRAINING` can cause another.

    The cause comes earlier in `CHAIN`, and the effect begins while the cause lasts, give or take
    `slack` steps. A gradient that rises with the loss is an effect, but one that rises before it is a
    cause.
    """
    first, last = cause.steps or (0, 0)
    is_first = cause.id == "grad_high:rise" and first + slack < effect.begin
    is_known = is_first or _rank(cause) < _rank(effect)
    is_training = max(_rank(cause), _rank(effect)) < ENDS[0]
    return is_known and is_training and first - slack <= effect.begin <= last + slack


def checklist(
    run: AnalysedRun, findings: tuple[Finding, ...], unjudged: Mapping[str, str]
) -> tuple[CheckItem, ...]:
    """Return all checklist lines with their status."""
    items = []
    for id_, phase, check, role, text in rows_of(_LINES):
        # a finding that begins later does not concern the start
        last = START_STEPS if phase == "start" else run.last_step
        faults = [one for one in findings if one.id.startswith(check) and one.begin <= last]
        reason = unjudged.get(check) or unjudged.get(check.partition(":")[0])
        if faults:  # the worst comes first
            status = STATUS[faults[0].level]
            detail = " ".join(fault.title for fault in faults)
        elif reason:
            status = "unknown"
            detail = reason
        else:
            status = "pass"
            detail = "nothing found"
            if role:
                values = run.get(role).values
                detail = f"{number(values[0])} to {number(values[-1])}"
        items.append(CheckItem(id_, phase, text, status, detail))
    return tuple(items)
