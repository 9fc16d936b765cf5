"""Checks of the loss, the gradient norm and the learning rate."""

from collections.abc import Iterator

import numpy as np

from trainer.report.advice import how_common, why_recovered
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.anomalies import is_of
from trainer.report.checks import START_STEPS, fail, finding, info, note, warn
from trainer.report.formatting import counted, interval, listed, number, share
from trainer.report.inventory import phases
from trainer.report.learning_rate import learning_rate, scheduled
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.shapes import Move, beyond, shift
from trainer.report.statistics import bins, noise, slope, within
from trainer.report.vocabulary import ROLES
from trainer.report.words import is_led_by_rate, moved_along

NUM_STRETCHES = 20
"""Parts the first steps are divided into when their trend is tested; points that a rate is
judged by.
"""
NUM_ZERO = 10
"""Losses of exactly 0 that are a fault."""
NUM_EARLY, NUM_FEW = 96, 5
"""Points in which a rise is one of the first steps, where a level is that of few points."""
NUM_RECENT = 32
"""Points whose median is the present level of a loss."""
POLICY_RISE = 0.5
"""The rise of a loss that changes its sign, as it holds a penalty for KL that grows."""
EXPLOSION = 20
"""Times the usual gradient norm."""
SWING = 0.5
"""Change of a loss from point to point, as a share of it, from here on violent."""
JITTER = 0.1
"""The same, from here on worth a word."""


@finding("loss_nonfinite")
def nonfinite(run: AnalysedRun) -> Iterator[Finding]:
    """Find losses and norms that are no numbers, and steps that the run counted as such."""
    found = {}
    for key in (run.name("loss"), run.name("grad"), "train/nonfinite"):
        if (series := run.log.series.get(key)) is not None:
            is_counter = key == "train/nonfinite"
            found[key] = series[series.values > 0 if is_counter else ~np.isfinite(series.values)]
    every = sorted({step for series in found.values() for step in series.steps.tolist()})
    if every:
        yield fail(
            f"{counted(len(every), 'step')} with a loss or gradient that is not a number, first at "
            f"{every[0]}.",
            metric=next(key for key, series in found.items() if len(series)),
            steps=(every[0], every[-1]),
            evidence=[f"steps {listed(map(str, every))}"],
            cause="Overflow in 16 bit numbers, a learning rate too high, or a sample that breaks "
            "the model.",
            remedy=("lower_rate", "clip", f"Look at the batch of step {every[0]}."),
        )


@finding("loss_zero", "loss", profile=["sft", "controller"])
def zero_losses(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    zero = losses[losses.values == 0]
    if len(zero) < NUM_ZERO:
        return
    cause = "No effective groups: where all rewards of a group are equal, its advantages are 0."
    remedy = ["Check that a group holds several answers to one prompt.", "larger_group"]
    if run.profile == "sft":
        cause = "No label token in the batches: wrong template or mask, or samples cut too early."
        remedy = ["Look at the labels of a batch, and at {max_length} and the truncation."]
    yield fail(
        f"The loss is exactly 0 at {counted(len(zero), 'point')}: nothing was learnt there.",
        steps=zero.ends,
        cause=cause,
        remedy=remedy,
    )


@finding("loss_not_falling", "loss", profile=["sft", "generic"])
def falling(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    """Test the trend, up to a rise that is a fault of its own; and that of the first steps."""
    p, rise = run.limits["trend_p"], rise_of(run, losses)
    if len(losses) < NUM_STRETCHES:
        raise NotJudged(f"{len(losses)} points of loss, {NUM_STRETCHES} are needed")
    before = within(losses, 0, rise.at) if rise else losses
    first = bins(within(losses, 0, START_STEPS), NUM_STRETCHES)
    falls = any(slope(part).is_falling(p) for part in (losses, before))
    if not falls and not run.is_warming_up and (rise is None or len(before) >= NUM_EARLY):
        yield warn(
            f"The loss does not fall: its level is {number(slope(losses).level)} over "
            f"{len(losses)} points.",
            steps=losses.ends,
            cause="The learning rate is too low or too high, or the labels carry nothing to learn.",
            remedy=("Try {lr} three times higher and lower for 100 steps; check the labels.",),
        )
    elif len(first) == NUM_STRETCHES and not slope(first).is_falling(p):
        yield note(
            f"The loss does not fall yet in the first {START_STEPS} steps.",
            id="start",
            steps=first.ends,
            cause="A long warm-up, or noise larger than the progress of so few steps.",
            remedy=("None needed where the rate was still warming up.",),
        )


def rise_of(run: AnalysedRun, losses: Series) -> Move | None:
    """Return the rise of a loss over its best level so far, if it is more than noise.

    A loss that changes its sign is looked at in its own unit. In the first steps a level is that of
    few points, which no later one sees again.
    """
    ratio, least = run.limits["diverging_ratio"], run.limits["diverging_rise"]
    sigma, part = 4, 0.0
    if losses.values.min() <= 0:
        ratio, sigma, part, least = 1.0, 6, 0.5, POLICY_RISE
    recent = min(NUM_RECENT, max(NUM_FEW, len(losses) // 8))
    early = losses.steps[: min(NUM_EARLY, len(losses) // 4)]
    for width in (NUM_FEW, recent):
        rise = shift(losses, sign=1, ratio=ratio, sigma=sigma, share=part, width=width)
        if rise is None or rise.after - rise.before < least:
            continue
        lasts = len(within(losses, *rise.steps)) >= recent
        if not rise.is_lasting:  # less than this comes by chance
            lasts &= shift(losses, sign=1, ratio=ratio, sigma=8, width=width) is not None
        is_early = rise.steps[0] <= early.max()
        # a level of few points tells the first steps alone, one of many tells both
        if lasts and (rise.is_lasting if is_early else width == recent):
            return rise
    return None


@finding("loss_diverging", "loss", profile=["sft", "grpo", "generic"])
def diverging(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    rise = rise_of(run, losses)
    if rise is None:
        return
    is_early = len(within(losses, 0, rise.at)) < NUM_EARLY
    back = "did not come back" if rise.is_lasting else f"came back after step {rise.steps[1]}"
    restart = "Start again." if is_early else f"Go back to {run.checkpoint(rise.at)}."
    yield (fail if rise.is_lasting else warn)(
        f"The loss rose from {number(rise.before)} to {number(rise.after)} from step "
        f"{rise.steps[0]} on and {back}.",
        steps=rise.steps,
        cause="The learning rate is too high for these weights, its warm-up too short, or batches "
        "throw the model off.",
        remedy=(restart, "lower_rate", "clip"),
    )


@finding("loss_oscillating", "loss", profile=["sft", "generic", "controller"])
def oscillating(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    """Hold the changes from point to point against the level; a policy's loss has no level."""
    changes = np.diff(np.log(losses.values.clip(min=1e-9)))
    swings, limit = Series(losses.steps[1:], np.abs(changes)), SWING
    if run.profile == "controller":
        swings, limit = Series(losses.steps, np.abs(losses.values)), run.limits["loss_swing"]
    found = beyond(swings, high=limit, width=max(10, len(swings) // 20))
    if found and not slope(within(losses, *found.steps)).is_falling(run.limits["trend_p"]):
        yield warn(
            f"The loss swings violently ({number(found.level)}, limit {number(limit)}) from step "
            f"{found.steps[0]} on, without getting better.",
            steps=found.steps,
            cause="The learning rate is too large, or the batch too small.",
            remedy=("lower_rate", "larger_batch"),
        )


@finding("loss_spike", "loss")
def loss_spikes(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    spikes = [a for a in run.anomalies if is_of(a, "loss")]
    movers = [m for a in spikes for m in a.movers if m.metric in ROLES["loss"]]
    if not movers:
        return
    peak = max(movers, key=lambda mover: abs(mover.peak_value))
    is_led = all(is_led_by_rate(run, a) for a in spikes)
    yield warn(
        f"{counted(len(spikes), 'loss spike')}, the furthest {number(peak.peak_value)} at step "
        f"{peak.peak_step}; the usual loss is {number(float(np.median(losses.values)))}.",
        steps=(spikes[0].steps[0], spikes[-1].steps[1]),
        evidence=[
            f"at {listed(f'{a.peak_step} ({a.percent:.1f} %)' for a in spikes)}",
            f"{sum(a.has_recovered for a in spikes)} went back to the usual level",
        ],
        cause="The learning rate jumped first."
        if is_led
        else "Updates or batches that throw the model off; see what moved along.",
        remedy=("watch",) if is_led else ("clip", "larger_batch", "watch"),
    )


@finding("jitter_normal", "loss")
def jitter(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    """Tell noise from point to point while the run improves: by its rewards in a controller."""
    p, is_policy = run.limits["trend_p"], run.profile == "controller"
    level = 1.0 if is_policy else max(abs(float(np.median(losses.values))), 1e-9)
    improves = run.slope("loss").is_falling(p)
    if is_policy:
        improves = run.find("reward") is not None and run.slope("reward").is_rising(p)
    if improves and noise(losses) > JITTER * level:
        yield info(
            f"The loss jitters by {number(noise(losses))} from point to point while the run gets "
            f"better: that is normal.",
            evidence=[phases(run, "loss")],
            cause="Samples of unlike difficulty, small batches, sampled groups, the early phase of "
            "training.",
            remedy=("None needed. To smooth it:", "larger_batch", "larger_group")[: 2 + is_policy],
        )


@finding("grad_high", "grad")
def explosions(run: AnalysedRun, norms: Series) -> Iterator[Finding]:
    """Find bursts above the highest usual level that the norm has in a third of the run."""
    usual = max(float(np.median(part)) for part in np.array_split(norms.values, 3) if len(part))
    far = norms[norms.values > EXPLOSION * usual]
    if len(far):
        yield warn(
            f"Gradient explosions: up to {number(float(far.values.max()))} at step "
            f"{far.steps[np.argmax(far.values)]}; {number(usual)} is usual.",
            id="explosion",
            steps=far.ends,
            evidence=[f"{counted(len(far), 'point')}: {listed(map(str, far.steps.tolist()))}"],
            cause="A batch or a policy far from the usual makes very large gradients; an unclipped "
            "update then throws the weights further off.",
            remedy=("clip", "lower_rate"),
        )


@finding("grad_unclipped", "grad")
def unclipped(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    met = [a for a in run.anomalies if is_of(a, "grad")]
    if run.is_configured and met and not run.setting("clip"):
        yield warn(
            f"{counted(len(met), 'burst')} of the gradient went into the weights unclipped: "
            f"{run.facts['clip']}.",
            steps=(met[0].steps[0], met[-1].steps[1]),
            evidence=[run.facts["clip"], run.facts["lr"]],
            cause="Without clipping one extreme batch moves all weights by a multiple of a usual "
            "step.",
            remedy=("clip",),
        )


@finding("lr_schedule", "lr")
def schedule(run: AnalysedRun, rates: Series) -> Iterator[Finding]:
    """Find where the rate leaves its schedule, jumps, or never falls."""
    if len(rates) < NUM_STRETCHES:
        raise NotJudged(f"{len(rates)} points of learning rate, {NUM_STRETCHES} are needed")
    told = learning_rate(rates, (), total_steps=run.total_steps)
    restored = "A scheduler that was changed or restored wrongly, or a change by hand."
    if told.raised:
        worst = max(told.raised, key=lambda stretch: stretch.factor)
        led = [a for a in run.anomalies if is_led_by_rate(run, a)]
        yield warn(
            f"The learning rate jumps from {number(worst.level)} to {number(worst.peak)}, "
            f"{number(worst.factor)} times its schedule: "
            f"{listed(interval(stretch.steps) for stretch in told.raised)}.",
            id="raised",
            steps=(told.raised[0].steps[0], told.raised[-1].steps[1]),
            value=worst.factor,
            evidence=[f"{moved_along(a)} at {interval(a.steps)}" for a in led],
            cause=restored,
            remedy=(
                f"Find what set the rate at step {worst.steps[0]}; go back to a checkpoint before "
                "it and train on with the schedule unbroken.",
            ),
        )
    at = _jump(run, rates, told.peak) if told.schedule == "unknown" else None
    if at is not None:
        yield warn(
            f"The learning rate jumps at step {at} and follows no known schedule.",
            id="jumps",
            steps=(at, at),
            cause=restored,
            remedy=("Compare the rate before and after each restart.",),
        )
    is_wanted = "constant" in str(run.setting("schedule"))
    if told.schedule == "constant" and not is_wanted and run.last_step >= 0.9 * run.total_steps:
        yield note(
            f"The learning rate stays at {number(told.peak)} to the end.",
            id="decay",
            steps=rates.ends,
            cause="No schedule is set; without decay the weights keep moving with the last batches.",
            remedy=("decay",),
        )


def _jump(run: AnalysedRun, series: Series, peak: float) -> int | None:
    """Return the first step after the warm-up at which the rate moves further than a schedule
    does. A rise from a low rate to the peak before is a restart of cosines.
    """
    if "restart" in str(run.setting("schedule")) or peak <= 0:
        return None
    rates = series.values / peak
    before, after = rates[:-1], rates[1:]
    moves, highest = after - before, np.maximum.accumulate(before)
    is_restart = (before < 0.12 * highest) & (after > 0.7 * highest) & (after < 1.05 * highest)
    is_jump = ((moves > 0.05) & ~is_restart) | (moves < -0.25)
    jumps = np.flatnonzero(is_jump & np.logical_or.accumulate(moves < 0))
    return int(series.steps[1 + jumps[0]]) if len(jumps) else None


@finding("lr_schedule:warmup", "lr")
def warmup(run: AnalysedRun, rates: Series) -> Iterator[Finding]:
    """Find that the rate does not rise as long as the configuration says."""
    ratio = run.config("optim.lr_warmup_steps_ratio", "warmup_ratio", "warmup_steps_ratio")
    fixed = run.config("optim.lr_warmup_steps", "warmup_steps")
    # ours and verl's: null or -1 leave it to the share
    is_fixed = fixed is not None and int(fixed) > 0
    length = int(fixed if is_fixed else float(ratio or 0) * run.total_steps)
    # frameworks differ by a step or two in where a warm-up ends
    inside = scheduled(rates)
    inside = inside[inside.steps <= 0.9 * length]
    if len(inside) >= 3 and not np.all(np.diff(inside.values) > 0):
        yield warn(
            f"The learning rate does not rise in its warm-up of {length} steps.",
            steps=inside.ends,
            cause="The scheduler is not stepped, or was restored from another run.",
            remedy=("Check {warmup} and how often the scheduler is stepped.",),
        )


@finding("lr_too_high", "lr")
def unstable_at_high_rate(run: AnalysedRun, rates: Series) -> Iterator[Finding]:
    roles = ("loss", "grad", "kl", "update_kl")
    unstable = [a for a in run.anomalies if any(is_of(a, role) for role in roles)]
    told = learning_rate(rates, unstable, total_steps=run.total_steps)
    part = told.anomalies_at_high_share or 0.0
    if len(unstable) > 1 and part > 0.5:
        yield warn(
            f"{share(part)} of the unstable intervals lie where the learning rate is near its peak "
            f"{number(told.peak)}: it is too high for too long.",
            steps=(unstable[0].steps[0], unstable[-1].steps[1]),
            evidence=[f"schedule {told.schedule}", run.facts["lr"], run.facts["warmup"]],
            cause=f"Updates are large while the run is unstable. {why_recovered(run)} "
            f"{how_common(run)}",
            remedy=("lower_rate", "decay"),
        )


@finding("not_learning")
def learning(run: AnalysedRun) -> Iterator[Finding]:
    """Find that nothing that learning shows in changes at all; in a controller by its results."""
    roles = ("loss", "val_loss", "reward", "accuracy", "violation", "grad")
    tracked = {run.name(role): series for role in roles if (series := run.find(role)) is not None}
    long = {key: series.values for key, series in tracked.items() if len(series) >= 10}
    # a range below 1 % of the level is constant
    if long and all(np.ptp(values) <= 0.01 * abs(np.median(values)) for values in long.values()):
        yield fail(
            f"Nothing changes: {listed(long)} constant over the run.",
            metric=next(iter(long)),
            cause="No update reaches the weights, or no sample carries a signal.",
            remedy=("Check that {lr} is above 0, that parameters are trained, and the labels.",),
        )
    if run.profile != "controller" or len(run.epochs("reward")) < run.limits["min_epochs"]:
        return
    if run.get("reward").values.max() < 0 and run.get("accuracy").values.max() == 0:
        yield fail(
            "Bad run: the reward stays below 0 and the accuracy at 0 throughout.",
            id="bad",
            metric=run.name("reward"),
            cause="The controller learns nothing: answers missing from the metadata, or unsuitable "
            "reward weights.",
            remedy=(
                "Check the answers field, generated texts and the metric, then the weights of the "
                "reward.",
            ),
        )
