"""Checks of the loss, the gradient norm and the learning rate."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.checks import START_STEPS, Findings, fail, finding, info, note, warn
from trainer.tools.report.formatting import counted, interval, listed, number
from trainer.tools.report.learning_rate import (
    learning_rate,
    raised_rates,
    restarted_at,
    scheduled,
)
from trainer.tools.report.readers.parsing import as_step
from trainer.tools.report.result import Anomaly, Mover
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import Move, shift
from trainer.tools.report.statistics import (
    bins,
    is_falling,
    is_rising,
    rolling,
    slope,
    within,
)
from trainer.tools.report.words import how_common, moved_along, why_recovered
from trainer.train.detection.window import noise, spread

NUM_STRETCHES = 20
"""The first steps are divided into this many bins to test their trend. A trend or a schedule needs
at least as many points.
"""
NUM_EARLY = 96
NUM_FEW = 5
"""A rise within the first `NUM_EARLY` points is early; for such a rise, a level is the median of
only `NUM_FEW` points.
"""
NUM_ROWS = 3
"""The number of training samples that a loss spike names."""
NUM_RECENT = 32
"""The median of this many points is the present level of a loss."""
RISE_RATIO = 1.25
LEAST_RISE = 0.1
"""A loss diverges if its present level is this many times its best level and this many nats above
it.
"""
LOW_LOSS = 0.02
"""A loss below `LEAST_RISE` diverges if it doubles, but at least by this many nats."""
POLICY_RISE = 0.5
"""The rise at which the loss of a policy, or one that changes its sign, diverges. Such a loss can
rise because it contains a growing KL penalty.
"""
EXPLOSION = 20
"""A gradient norm above this many times its usual level is an explosion, unless most bursts stay
below half of that: then it is the end of a heavy tail.
"""
LEAST_FALL = 0.03
HIDDEN_FALL = 0.1
MISSING_START = 0.25
"""A flat loss is not judged if its noise can hide a fall of the first share (a quarter of it if the
validation loss falls), or if the log lacks more than the second share of the steps because it
starts at a resume.
"""
GUESSING = 7
GUESSING_FALL = 0.1
"""A loss above this many nats is close to the loss of guessing tokens. Any training lowers it by
more than this share.
"""
JUMP_WIDTH = 8
MIN_JUMP_POINTS = 64
LEAST_JUMP = 0.08
JUMP_SPREADS = 6
"""A loss jumps if the medians of this many points before and after differ by this share and by this
many times the usual spread of such differences. If half of the rise is gone after as many points
again, it is a spike.
"""
LONGEST_WARMUP = 2000
JITTER = 0.1
"""Noise above this share of the loss is reported."""


def _span(moved: Mapping[Anomaly, Iterable[Mover]]) -> tuple[int, int]:
    """Return the first and the last step of the intervals and of the peaks of their moved metrics."""
    steps = [step for one in moved for step in one.steps]
    steps += [mover.peak_step for mover in chain(*moved.values())]
    return min(steps), max(steps)


@finding("loss_nonfinite")
def nonfinite(run: AnalysedRun) -> Findings:
    """Find losses and gradient norms that are not finite."""
    bad: dict[int, str] = {}
    for key in filter(None, map(run.key, ("val_loss", "grad", "loss"))):
        series = run.log.series[key]
        bad |= dict.fromkeys(series.steps[~np.isfinite(series.values)].tolist(), key)
    if bad:
        first = min(bad)
        last = max(bad)
        yield fail(
            f"{counted(len(bad), 'step')} with a loss or gradient that is not finite, first at "
            f"{first}.",
            metric=bad[first],
            steps=(first, last),
            evidence=[f"steps {listed(map(str, sorted(bad)))}"],
            reason="overflow",
        )


@finding("loss_not_falling", "loss", profiles="sft generic", least=NUM_STRETCHES)
def falling(run: AnalysedRun, losses: Series) -> Findings:
    """Find a loss that does not fall over the run, or that does not fall in the first steps.

    A later rise is a separate fault, so a loss that falls before it rises passes.
    """
    rise = rise_of(losses)
    rates = run.find("lr")
    before = within(losses, 0, rise.at) if rise else losses
    is_at_peak = bool(rates) and np.argmax(rates.values) == len(rates) - 1
    is_warming_up = is_at_peak and run.last_step < run.total_steps
    first = bins(within(losses, 0, START_STEPS), NUM_STRETCHES)
    course = slope(losses)
    is_guessing = course.level > GUESSING and course.relative_change > -GUESSING_FALL
    falls = not is_guessing and (_falls(losses) or _falls(before))
    is_expected = not is_warming_up and (rise is None or len(before) >= NUM_EARLY)
    if not falls and is_expected and _can_show_fall(run, losses, course.level):
        yield warn(
            f"The loss does not fall: its level is {number(course.level)} over "
            f"{len(losses)} points.",
            steps=losses.ends,
            reason="no_signal",
        )
    elif len(first) == NUM_STRETCHES and not is_falling(first):
        yield note(
            f"The loss did not fall in the first {START_STEPS} steps.",
            id="start",
            steps=first.ends,
            reason="slow_start",
        )
    elif not falls and is_expected:
        raise NotJudged(
            "the log lacks the first quarter of the steps, or the loss is too noisy to show a fall"
        )


def _falls(losses: Series) -> bool:
    """Return True if a loss falls by at least `LEAST_FALL`, relative to its final level.

    Either it has a falling trend and the median of its first tenth is that much above the median of
    its last tenth, or its first few points are that much above its last few, beyond the noise.
    """
    clear = 5 * noise(losses.values) / math.sqrt(NUM_FEW)
    tenth = len(losses) // 10 + 1
    for width, least in ((tenth, 0.0 if is_falling(losses) else math.inf), (NUM_FEW, clear)):
        first, last = (np.median(part) for part in (losses.values[:width], losses.values[-width:]))
        if first - last >= max(LEAST_FALL * abs(last), least):
            return True
    return False


def _can_show_fall(run: AnalysedRun, losses: Series, level: float) -> bool:
    """Return True if a log would reveal a falling loss: it has the start of the run, and two
    standard errors of the change of a fitted line are at most `HIDDEN_FALL` of the level.
    """
    error = noise(losses.values) * math.sqrt(12 / len(losses))
    hidden = HIDDEN_FALL / 4 if is_falling(run.find("val_loss")) else HIDDEN_FALL
    is_clear = 2 * error <= hidden * abs(level)
    return is_clear and losses.steps[0] <= MISSING_START * run.last_step


def rise_of(losses: Series) -> Move | None:
    """Return the rise of a loss over its best level so far, if it is more than noise.

    The rise is a ratio, or a difference if the loss changes sign. In the first steps, a level is
    the median of only a few points, because a wider window would miss a brief low.
    """
    ratio, sigma, part, least = RISE_RATIO, 4, 0.0, LEAST_RISE
    if losses.values.min() <= 0:
        ratio, sigma, part, least = 1.0, 6, 0.5, POLICY_RISE
    recent = min(NUM_RECENT, max(NUM_FEW, len(losses) // 8))
    last_early = losses.steps[min(NUM_EARLY, len(losses) // 4) - 1]
    for width in (NUM_FEW, recent):
        rise = shift(
            losses,
            sign=1,
            ratio=ratio,
            sigma=sigma,
            share=part,
            width=width,
        )
        if rise is None or rise.after - rise.before < min(least, max(rise.before, LOW_LOSS)):
            continue
        lasts = len(within(losses, *rise.steps)) >= recent
        if not rise.is_lasting:  # a smaller rise that passes can occur by chance
            lasts &= (
                shift(
                    losses,
                    sign=1,
                    ratio=ratio,
                    sigma=8,
                    width=width,
                )
                is not None
            )
        is_early = rise.steps[0] <= last_early
        # levels of a few points serve only for the first steps, levels of many points for both
        if lasts and (rise.is_lasting if is_early else width == recent):
            return rise
    return None


@finding("loss_diverging", "loss", profiles="sft grpo generic")
def diverging(run: AnalysedRun, losses: Series) -> Findings:
    """Find a loss that rose above its best level, whether or not it came back."""
    rise = rise_of(losses)
    if rise is None:
        return
    is_small = rise.after - rise.before < POLICY_RISE
    if is_small if run.profile == "grpo" else _begins_with(_jump(losses), losses, rise):
        return
    is_early = len(within(losses, 0, rise.at)) < NUM_EARLY
    back = "did not come back" if rise.is_lasting else f"came back after step {rise.steps[1]}"
    restart = "Start again." if is_early else f"Go back to {run.checkpoint(rise.at)}."
    yield (fail if rise.is_lasting else warn)(
        f"The loss rose from {number(rise.before)} to {number(rise.after)} at step "
        f"{rise.steps[0]} and {back}.",
        steps=rise.steps,
        reason="too_fast",
        remedy=(restart, "lower_rate", "clip"),
    )


@finding("loss_spike", "loss")
def loss_spikes(run: AnalysedRun, losses: Series) -> Findings:
    """Find intervals in which the loss left its usual range, with the hardest samples of the worst
    step.
    """
    spikes = run.moved("loss")
    if not spikes:
        return
    peak = max(chain(*spikes.values()), key=lambda mover: abs(mover.peak_value))
    rows = run.log.hardest_by_step.get(peak.peak_step, ())
    named = listed(f"{place} ({number(loss)})" for place, loss in rows[:NUM_ROWS])
    yield warn(
        f"{counted(len(spikes), 'loss spike')}, the largest {number(peak.peak_value)} at step "
        f"{peak.peak_step}; the usual loss is {number(np.median(losses.values))}.",
        steps=_span(spikes),
        evidence=[
            f"at {listed(f'{a.peak_step} ({a.percent:.1f} %)' for a in spikes)}",
            f"{sum(a.has_recovered for a in spikes)} returned to the usual level",
            f"highest losses of step {peak.peak_step}: {named}" if rows else "",
        ],
        reason="bad_batches",
    )


@finding("jitter_normal", "loss")
def jitter(run: AnalysedRun, losses: Series) -> Findings:
    """Explain noise from point to point in a run that improves: its loss falls or, in a controller
    run, its rewards rise.
    """
    is_controller = run.profile == "controller"
    level = 1.0 if is_controller else abs(slope(losses).level)
    improves = is_rising(run.get("reward")) if is_controller else is_falling(losses)
    jitters = noise(losses.values)
    if improves and jitters > JITTER * level:
        yield info(
            f"The loss varies by {number(jitters)} from point to point while the run improves: "
            f"that is normal.",
            evidence=[_phases(losses)],
            reason="jitter_of_groups" if is_controller else "jitter",
        )


def _phases(losses: Series) -> str:
    """Describe the level and the noise of a loss in each third of the run."""
    parts = np.array_split(losses.values, 3)
    told = [f"{number(part.mean())} ± {number(noise(part))}" for part in parts]
    return "early {}, middle {}, late {}; level ± jitter".format(*told)


@finding("grad_high:explosion", "grad")
def explosions(run: AnalysedRun, norms: Series) -> Findings:
    """Find bursts of the gradient norm far above the highest median of any third of the run. If the
    run does not clip gradients, any burst counts.
    """
    bursts = run.moved("grad")
    if not bursts:
        return
    usual = max(np.median(part) for part in np.array_split(norms.values, 3))
    movers = [*chain(*bursts.values())]
    peak = max(movers, key=lambda mover: mover.peak_value)
    typical = np.median([mover.peak_value for mover in movers])
    is_unclipped = run.is_configured and not run.setting("clip")
    is_high = peak.peak_value > EXPLOSION * usual and typical > EXPLOSION * usual / 2
    if is_unclipped or is_high:
        yield warn(
            f"Gradient explosions: the norm reached {number(peak.peak_value)} at step "
            f"{peak.peak_step}; the usual norm is {number(usual)}.",
            steps=_span(bursts),
            evidence=[
                f"{counted(len(bursts), 'burst')}: {listed(interval(a.steps) for a in bursts)}",
                run.quoted("clip"),
            ],
            reason="exploded",
        )


@finding("lr_schedule", "lr", least=NUM_STRETCHES)
def schedule(run: AnalysedRun, rates: Series) -> Findings:
    """Find stretches in which the learning rate is above its schedule."""
    raised = raised_rates(rates)
    if not raised:
        return
    worst = max(raised, key=lambda stretch: stretch.factor)
    led = [
        anomaly
        for anomaly in run.anomalies
        if any(first <= anomaly.steps[0] <= last + 1 for first, last in (r.steps for r in raised))
    ]
    yield warn(
        f"The learning rate jumps from {number(worst.level)} to {number(worst.peak)}, "
        f"{number(worst.factor)} times its schedule: "
        f"{listed(interval(stretch.steps) for stretch in raised)}.",
        id="raised",
        steps=(raised[0].steps[0], raised[-1].steps[1]),
        value=worst.factor,
        evidence=[f"{moved_along(a)} at {interval(a.steps)} followed" for a in led],
        reason="raised",
    )


@finding("lr_schedule:restarted", "lr", least=NUM_STRETCHES)
def restarted(run: AnalysedRun, rates: Series) -> Findings:
    """Find a learning rate that warms up a second time in the middle of its schedule."""
    at = restarted_at(rates)
    if at is None:
        return
    yield warn(
        f"The learning rate fell after step {at} and warmed up again.",
        steps=(at, run.last_step),
        reason="no_scheduler",
    )


@finding("loss_jump", "loss", profiles="sft generic", least=MIN_JUMP_POINTS)
def jumps(run: AnalysedRun, losses: Series) -> Findings:
    """Find a loss that jumps from one point to the next and recovers slowly."""
    jump = _jump(losses)
    if jump is None:
        return
    rise = rise_of(losses)
    if rise is not None and not _begins_with(jump, losses, rise):
        raise NotJudged("the loss rose and diverged")
    yield warn(
        f"The loss jumped from {number(jump.before)} to {number(jump.after)} after step {jump.at}.",
        steps=jump.steps,
        value=jump.after,
        reason="no_optimizer",
    )


def _jump(losses: Series) -> Move | None:
    """Return the largest jump of a loss that does not recover at once."""
    if len(losses) < MIN_JUMP_POINTS:
        return None
    logs = np.log(losses.values.clip(min=LOW_LOSS))
    levels = np.median(rolling(logs, JUMP_WIDTH, 1), axis=1)
    before = levels[: -2 * JUMP_WIDTH]
    after = levels[JUMP_WIDTH:-JUMP_WIDTH]
    later = levels[2 * JUMP_WIDTH :]
    rises = after - before
    least = max(LEAST_JUMP, JUMP_SPREADS * spread(rises - np.median(rises)))
    rises[later - before < rises / 2] = 0  # spikes
    rises[: 2 * JUMP_WIDTH] = 0
    highest = np.argmax(rises)
    if rises[highest] < least:
        return None
    low, high = np.exp([before[highest], after[highest]])
    steps = losses[int(highest) + JUMP_WIDTH - 1 :].ends
    return Move(steps, steps[0], low, high, is_lasting=False)


def _begins_with(jump: Move | None, losses: Series, rise: Move) -> bool:
    """Return True if a rise that reversed began with the jump."""
    if jump is None or rise.is_lasting:
        return False
    return bool(np.ptp(np.searchsorted(losses.steps, [jump.at, rise.at])) <= JUMP_WIDTH)


@finding("lr_schedule:warmup", "lr")
def warmup(run: AnalysedRun, rates: Series) -> Findings:
    """Find a learning rate that does not rise for as long as the configured warm-up."""
    length = as_step(run.config("optim.lr_warmup_steps", "warmup_steps")) or 0
    if not length:  # in verl, null or -1 means that the share of the steps decides
        length = int((run.amount("warmup") or 0) * run.total_steps)
    # frameworks differ by a step or two in where they end a warm-up
    inside = within(scheduled(rates), 0, 0.9 * length)
    falls = bool(np.any(np.diff(inside.values) < 0))
    if len(inside) >= 3 and (falls or inside.values[0] == inside.values[-1]):
        yield warn(
            f"The learning rate does not rise during its warm-up of {length} steps.",
            steps=inside.ends,
            reason="no_warmup",
        )
    elif not learning_rate(rates, (), run.total_steps).warmup_steps:
        raise NotJudged("there was no warm-up")


@finding("lr_schedule:rising", "lr", least=NUM_STRETCHES)
def endless_warmup(run: AnalysedRun, rates: Series) -> Findings:
    """Find a learning rate that still rises in the second half of the planned steps, or after
    `LONGEST_WARMUP` steps if the plan is not known.
    """
    last = run.last_step
    rises = np.all(np.diff(rates.values) >= 0) and rates.values[-1] > 1.5 * np.median(rates.values)
    is_late = last > (run.log.total_steps or 2 * LONGEST_WARMUP) / 2
    if is_late and rises:
        yield warn(
            f"The learning rate still rises at step {last} of {run.log.total_steps or last}.",
            steps=rates.ends,
            reason="long_warmup",
        )


@finding("lr_too_high", "lr")
def unstable_at_high_rate(run: AnalysedRun, rates: Series) -> Findings:
    unstable = run.moved("loss", "grad", "kl", "update_kl")
    told = learning_rate(rates, unstable, run.total_steps)
    part = told.anomalies_at_high_share or 0.0
    if len(unstable) > 1 and part > 0.5:
        yield warn(
            f"{part:.1%} of the unstable intervals occur while the learning rate is near its peak "
            f"{number(told.peak)}: it is too high for too long.",
            steps=_span(unstable),
            evidence=[f"schedule {told.schedule}", run.quoted("lr"), run.quoted("warmup")],
            cause=f"Updates are large while the run is unstable. {why_recovered(run)} "
            f"{how_common(run)}",
            reason="too_high",
        )


@finding("not_learning")
def learning(run: AnalysedRun) -> Findings:
    """Find a run in which every metric that shows learning is constant."""
    roles = ("loss", "val_loss", "reward", "accuracy", "violation", "grad")
    long = {run.name(role): values for role in roles if len(values := run.find(role).values) >= 10}
    # a metric whose range is within 1 % of its level is constant
    if long and all(np.ptp(values) <= 0.01 * abs(np.median(values)) for values in long.values()):
        yield fail(
            f"Nothing changes: {listed(long)} stayed constant over the run.",
            metric=next(iter(long)),
            reason="no_update",
        )
