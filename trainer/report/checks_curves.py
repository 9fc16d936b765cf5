"""Checks of the loss, the gradient norm and the learning rate."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trainer.report.advice import (
    Advice,
    clip,
    decay,
    how_common,
    larger_batch,
    larger_group,
    lower_rate,
    watch,
    why_recovered,
)
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.anomalies import is_of
from trainer.report.checks import Told, fail, finding, in_order, info, note, warn
from trainer.report.formatting import counted, interval, listed, number, share
from trainer.report.inventory import phases
from trainer.report.learning_rate import learning_rate, scheduled
from trainer.report.result import LearningRate
from trainer.report.run_log import Series
from trainer.report.shapes import beyond, bursts, in_a_row, trend
from trainer.report.statistics import (
    NUM_BINS,
    NUM_WINDOWS,
    Floats,
    Shift,
    bins,
    level_shift,
    noise,
    rolling_median,
    slope,
    within,
)
from trainer.report.vocabulary import ROLES
from trainer.report.words import is_led_by_rate, moved_along

NUM_RECENT, NUM_BEST = 32, 64
"""Points whose median is the present level of a loss, and the best level so far."""
NUM_EARLY, NUM_LEVEL = 96, 5
"""Points in which a rise is one of the first steps, and of the level before it."""
SIGMA = 4
HIDING = ("transformers", "ms-swift")
"""Trainers that by default log the running mean in place of a NaN loss."""
NUM_STRETCHES = 20
"""Parts the first steps are divided into when their trend is tested; points that a rate is
judged by.
"""
NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
NUM_PARTS = 3
"""Parts of a run with a usual level of their own: one that vanishes early is no level to hold
the others against.
"""
MIN_POINTS = 10
CERTAIN_WARMUP = 0.9
"""Frameworks differ by a step or two in where a warm-up ends."""
MIN_OVERLAPS = 2
"""One anomaly at a high rate is chance."""


@finding("loss_nonfinite", "V01")
def nonfinite(run: AnalysedRun) -> Iterator[Told]:
    """Losses and norms that are no numbers, and steps that the run itself counted as such."""
    key, norm = run.name("loss"), run.name("grad")
    if key not in run.log.series:
        raise NotJudged(f"the log has no {key}")
    bad = {name: run.log.series[name] for name in (key, norm) if name in run.log.series}
    steps = {name: series.steps[~np.isfinite(series.values)] for name, series in bad.items()}
    if (counter := run.log.series.get("train/nonfinite")) is not None:
        steps[key] = np.union1d(steps[key], counter.steps[counter.values > 0])
    if every := np.unique(np.concatenate(list(steps.values()))).tolist():
        hides = run.log.source in HIDING
        hint = (
            "This framework may log the running mean in place of a NaN loss: the norm shows it."
            if hides
            else ""
        )
        yield fail(
            f"{counted(len(every), 'step')} with a loss or gradient that is not a number, first at "
            f"{every[0]}.",
            metric=key if len(steps[key]) else norm,
            steps=(every[0], every[-1]),
            value=len(every),
            limit=0,
            evidence=[f"steps {listed(map(str, every))}", hint],
            cause="Overflow in 16 bit numbers, a learning rate too high, or a sample that breaks "
            "the model.",
            remedy=[lower_rate(run), clip(run), f"Look at the batch of step {every[0]}."],
        )


@finding("loss_zero", "V02", "loss", profile=["sft", "controller"])
def zero_losses(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    zero = losses[losses.values == 0]
    if len(zero) < run.limits["zero_points"]:
        return
    if run.profile == "sft":
        cause = "No label token in the batches: wrong chat template or mask, or samples cut before the answer."
        remedy: list[Advice | str] = [
            f"Look at the labels of a batch, and at {run.options['max_length']} and the truncation."
        ]
    else:
        cause = "No effective groups: where all rewards of a group are equal, its advantages are 0."
        remedy = ["Check that a group holds several answers to one prompt.", larger_group(run)]
    yield fail(
        f"The loss is exactly 0 at {counted(len(zero), 'point')}: nothing was learnt there.",
        steps=zero.ends,
        value=len(zero),
        limit=run.limits["zero_points"],
        evidence=[f"steps {listed(map(str, zero.steps.tolist()))}"],
        cause=cause,
        remedy=remedy,
    )


@finding("loss_start_high", "V03", "loss", profile=["sft"])
def first_loss(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """Against what is usual for a pretrained model."""
    if losses.steps[0] > run.limits["first_steps"]:
        raise NotJudged(f"the log begins at step {losses.steps[0]}")
    run.require_pretrained()
    first, value = losses[:NUM_ENDS], float(np.median(losses.values[:NUM_ENDS]))
    low, high = run.limits["loss_start_low"], run.limits["loss_start_high"]
    fault = run.limits["loss_start_fault"]
    title = f"The loss starts at {number(value)}; {number(low)} to {number(high)} is usual for a pretrained model."
    if value > fault:
        yield warn(
            title,
            steps=first.ends,
            value=value,
            limit=fault,
            cause="Data and model do not fit: wrong tokenizer or chat template, untrained weights.",
            remedy="Read a tokenized sample back, and check which weights were loaded.",
        )
    elif not low <= value <= high:
        yield note(title, steps=first.ends, value=value, limit=low if value < low else high)


@finding("loss_not_falling", "V04", "loss", profile=["sft", "generic"])
def falling(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """Over the run, up to a rise that did not pass, which is a fault of its own; and in the
    first steps.
    """
    p = run.limits["trend_p"]
    if len(losses) < NUM_STRETCHES:
        raise NotJudged(f"{len(losses)} points of loss, {NUM_STRETCHES} are needed")
    first = within(losses, 0, run.limits["first_steps"])
    start = slope(bins(first, NUM_STRETCHES)) if len(first) >= NUM_STRETCHES else None
    line = "" if start is None else "loss_falls"
    whole, lasting = (
        slope(losses),
        [a.steps[0] for a in run.anomalies if is_of(a, "loss") and not a.has_recovered],
    )
    before = within(losses, 0, lasting[0] - 1) if lasting else losses
    has_fallen = whole.is_falling(p) or slope(before).is_falling(p)
    if start is not None and start.is_falling(p):
        quarter = len(first) // 4
        begin, end = np.median(first.values[:quarter]), np.median(first.values[-quarter:])
        yield in_order(
            "loss_falls", f"{number(begin)} to {number(end)}, p = {number(start.p_value)}"
        )
        line = ""
    if not (has_fallen or _is_warming_up(run) or _early_rise(run, losses) is not None):
        so_far = (
            f"the first {run.last_step} steps"
            if run.last_step < run.total_steps
            else "the whole run"
        )
        yield warn(
            f"The loss does not fall over {so_far} (p = {number(whole.p_value)}).",
            steps=losses.ends,
            value=whole.p_value,
            limit=p,
            evidence=[f"trend {number(whole.change)} over the run, level {number(whole.level)}"],
            cause="The learning rate is too low or too high, or the labels carry nothing to learn.",
            remedy=f"Try {run.options['lr']} three times higher and lower for 100 steps; check the "
            f"labels.",
            line=line,
        )
    elif start is not None and line:
        yield note(
            f"The loss does not fall yet in the first {number(run.limits['first_steps'])} steps, "
            f"later it does.",
            id="start",
            steps=first.ends,
            value=start.p_value,
            limit=p,
            cause="A long warm-up, or noise larger than the progress of so few steps.",
            remedy="None needed where the rate was still warming up.",
            line=line,
        )


def _is_warming_up(run: AnalysedRun) -> bool:
    """Whether the run goes on and its learning rate has risen up to now."""
    rates = run.find("lr")
    return (
        rates is not None
        and run.last_step < run.total_steps
        and int(np.argmax(rates.values)) == len(rates) - 1 > 0
    )


def _rise(run: AnalysedRun, series: Series, best_of: tuple[int, int]) -> Shift | None:
    return level_shift(
        series,
        sigma=SIGMA,
        width=NUM_RECENT,
        ratio=run.limits["diverging_ratio"],
        rise=run.limits["diverging_rise"],
        least_points=run.limits["diverging_points"],
        best_of=best_of,
    )


def _early_rise(run: AnalysedRun, series: Series) -> Shift | None:
    """A rise in the first steps, from a level that later ones never see again: the rate was too
    high from the start.
    """
    if len(series) < 2 * NUM_EARLY or series.values.min() <= 0:
        return None
    rise = _rise(run, series, (NUM_LEVEL, NUM_EARLY))
    is_early = rise is not None and rise.is_lasting and rise.delay <= NUM_RECENT + NUM_LEVEL
    return rise if is_early else None


@finding("loss_diverging", "V05", "loss")
def diverging(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """A lasting rise over the best level so far; for epochs the rule that stops a run."""
    early = _early_rise(run, losses)
    rise = early
    if early is None and np.median(losses.values) > 0 and len(losses) >= 2 * NUM_BEST:
        rise = _rise(run, losses, (NUM_BEST, len(losses)))
    # no level was there to rise from
    is_early = rise is not None and rise.steps[0] <= losses.steps[:NUM_EARLY].max()
    if rise is not None and (rise.is_lasting or not is_early):
        yield _risen(run, rise, is_early=early is not None)
    has_epochs = run.find("epoch") is not None and len(run.epochs("loss")) != NUM_BINS
    if (run.profile == "controller" or has_epochs) and (wrong := trend(run, "loss", good=-1)):
        limit = run.limits["rising_epochs"]
        yield fail(
            f"The loss has been rising for more than {number(limit)} epochs, by "
            f"{number(wrong.change)}: "
            "stop or change course.",
            id="epochs",
            steps=wrong.steps,
            value=wrong.change,
            limit=limit,
            cause="Training diverges.",
            remedy=[f"Stop, go back to {run.checkpoint(wrong.best)}.", lower_rate(run)],
        )


def _risen(run: AnalysedRun, rise: Shift, *, is_early: bool) -> Told:
    ratio, limit, onset = rise.after / rise.before, run.limits["diverging_ratio"], rise.steps[0]
    cause = "The updates are too large: learning rate too high, gradient not clipped, or bad data from there on."
    way_back = f"Go back to {run.checkpoint(rise.calm)}."
    risen = f"The loss rose to {number(ratio)} times its best level from step {onset} and"
    if is_early:
        title = (
            f"The loss rose from {number(rise.before)} to {number(rise.after)} in the first steps, "
            f"from step {onset} on, and did not come back."
        )
        cause, way_back = (
            "The learning rate is too high for these weights, or its warm-up too short.",
            "Start again.",
        )
    elif rise.is_lasting:
        title = f"{risen} did not come back."
    else:
        title = f"{risen} fell below {number(limit)} times it after step {rise.steps[1]}."
    return (fail if rise.is_lasting else warn)(
        title,
        steps=rise.steps,
        value=ratio,
        limit=limit,
        cause=cause,
        remedy=[way_back, lower_rate(run), clip(run)],
    )


@finding("loss_oscillating", "V06", "loss", profile=["sft", "generic", "controller"])
def oscillating(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """Noise against the level; of a controller's loss, which has no level, how far it swings."""
    limit, size = run.limits["oscillation"], _relative_noise(losses)
    if run.profile == "controller":
        limit, (low, high) = (
            run.limits["oscillation_range"],
            np.quantile(losses.values, (0.05, 0.95)),
        )
        size = float(high - low) / 2
    if size > limit and not run.slope("loss").is_falling(run.limits["trend_p"]):
        yield warn(
            f"The loss swings violently ({number(size)}, limit {number(limit)}) without getting "
            f"better.",
            steps=losses.ends,
            value=size,
            limit=limit,
            cause="The learning rate is too large, or the batch too small.",
            remedy=[lower_rate(run), larger_batch(run)],
        )


def _relative_noise(series: Series) -> float:
    level = abs(float(np.median(series.values)))
    return noise(series) / level if level else 0.0


@finding("loss_spike", "V07", "loss")
def loss_spikes(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    spikes = [a for a in run.anomalies if is_of(a, "loss")]
    if not spikes:
        yield from _extremes(run, losses)
        return
    peak = max(
        (m for a in spikes for m in a.movers if m.metric in ROLES["loss"]),
        key=lambda mover: mover.peak_value,
    )
    level = abs(float(np.median(losses.values)))
    is_extreme = level > 0 and peak.peak_value > run.limits["loss_extreme"] * level
    extreme = f", {number(peak.peak_value / level)} times the usual loss" if is_extreme else ""
    places = listed(f"{a.peak_step} ({a.percent:.1f} %)" for a in spikes)
    is_led = all(is_led_by_rate(a) for a in spikes)
    highest = f"the highest {number(peak.peak_value)} at step {peak.peak_step}{extreme}"
    yield warn(
        f"{counted(len(spikes), 'loss spike')}, {highest}.",
        steps=(spikes[0].steps[0], spikes[-1].steps[1]),
        value=peak.z,
        limit=run.limits["loss_z" if peak.z > run.limits["loss_z"] else "metric_z"],
        evidence=[
            f"at {places}",
            f"{sum(a.has_recovered for a in spikes)} of {len(spikes)} went back to the usual level",
        ],
        cause="The learning rate jumped first."
        if is_led
        else "Updates or batches that throw the model off; see what moved along.",
        remedy=[watch(run)] if is_led else [clip(run), larger_batch(run), watch(run)],
    )


def _extremes(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """Losses of a controller, however few, that lie far outside of what is usual, above or
    below.
    """
    limit = max(
        run.limits["oscillation_range"],
        run.limits["loss_extreme"] * float(np.median(np.abs(losses.values))),
    )
    far = bursts(losses, low=-limit, high=limit)
    if run.profile != "controller" or not len(far):
        return
    worst = int(np.argmax(np.abs(far.values)))
    yield warn(
        f"{counted(len(far), 'extreme loss')}, the furthest {number(far.values[worst])} at step "
        f"{far.steps[worst]}.",
        steps=far.ends,
        value=far.values[worst],
        limit=limit,
        evidence=[f"steps {listed(map(str, far.steps.tolist()))}"],
        cause="Updates or batches that throw the model off; see what moved along.",
        remedy=[clip(run), larger_batch(run), watch(run)],
    )


@finding("loss_final", "V08", "loss", profile=["sft"])
def final_loss(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    run.require_pretrained()
    last, value = losses[-NUM_ENDS:], float(np.median(losses.values[-NUM_ENDS:]))
    low, high = run.limits["loss_final_low"], run.limits["loss_final_high"]
    memorised = run.limits["loss_final_memorised"]
    if value < memorised:
        yield warn(
            f"The loss ends at {number(value)}: the samples are probably known by heart.",
            steps=last.ends,
            value=value,
            limit=memorised,
            cause="Too many passes over too few samples.",
            remedy=f"Fewer {run.options['epochs']}, more data, an earlier checkpoint.",
            line="final_loss",
        )
    elif not low <= value <= high:
        yield note(
            f"The loss ends at {number(value)}; {number(low)} to {number(high)} is usual.",
            steps=last.ends,
            value=value,
            limit=low if value < low else high,
            line="final_loss",
        )
    else:
        yield in_order("final_loss", f"{number(value)}, usual {number(low)} to {number(high)}")


@finding("jitter_normal", "V09", "loss")
def jitter(run: AnalysedRun, losses: Series) -> Iterator[Told]:
    """Noise from point to point while the run improves: by its rewards where it is a controller."""
    rewards, p = run.find("reward"), run.limits["trend_p"]
    if run.profile == "controller":
        size, improves = noise(losses), rewards is not None and slope(rewards).is_rising(p)
        title = f"The loss jitters by {number(size)} from point to point while the rewards improve: that is normal."
    else:
        size, improves = _relative_noise(losses), run.slope("loss").is_falling(p)
        title = f"The loss jitters by {share(size)} from point to point while its means improve: that is normal."
    groups = [larger_group(run)] if run.profile in ("controller", "grpo") else []
    if improves and size > run.limits["jitter"]:
        yield info(
            title,
            value=size,
            limit=run.limits["jitter"],
            evidence=[phases(run, "loss")],
            cause="Samples of unlike difficulty, small batches, sampled groups, the early phase of "
            "training.",
            remedy=["None needed. To smooth it:", larger_batch(run), *groups],
        )


@finding("grad_range", "V10", "grad", profile=["sft"])
def gradient_range(run: AnalysedRun, norms: Series) -> Iterator[Told]:
    """In the range that is usual, over the run; and in the first steps."""
    whole = _outside(run, norms, norms)
    if whole:
        yield whole
    first = run.first(norms)
    at_start = _outside(run, norms, first, id_="start")
    if at_start is None:
        low, high = run.limits["grad_low"], run.limits["grad_high"]
        inside = 1 - len(bursts(first, low=low, high=high)) / len(first)
        yield in_order(
            "gradient_in_range", f"{share(inside)} between {number(low)} and {number(high)}"
        )
    else:
        yield replace(whole or at_start, line="gradient_in_range")


def _outside(run: AnalysedRun, norms: Series, part: Series, id_: str = "") -> Told | None:
    low, high = run.limits["grad_low"], run.limits["grad_high"]
    outside, median = bursts(part, low=low, high=high), float(np.median(norms.values))
    odd = len(outside) / len(part)
    if odd <= run.limits["grad_share"]:
        return None
    place = "first points" if id_ else "points"
    return note(
        f"The gradient norm is outside {number(low)} to {number(high)} at {share(odd)} of the "
        f"{place}.",
        id=id_,
        steps=outside.ends,
        value=median,
        limit=high if median > high else low,
        evidence=[f"median {number(median)}"],
        cause="An unusual scale of the loss or of the model; by itself no fault.",
        remedy="None needed where the loss falls steadily.",
    )


@finding("grad_high", "V11", "grad")
def high_gradients(run: AnalysedRun, norms: Series) -> Iterator[Told]:
    unstable, explosion = run.limits["grad_unstable"], run.limits["grad_explosion"]
    sustained = in_a_row(norms, norms.values > unstable)
    if run.profile == "sft" and len(sustained) >= run.limits["grad_unstable_points"]:
        yield warn(
            f"The gradient norm stays above {number(unstable)} for {len(sustained)} points.",
            id="sustained",
            steps=sustained.ends,
            value=sustained.values.max(),
            limit=unstable,
            cause="Training is unstable: the learning rate is too high.",
            remedy=[lower_rate(run), clip(run)],
        )
    usual = float(np.median(norms.values))
    far = bursts(norms, high=explosion * _highest_median(norms))
    if len(far):
        highest = float(far.values.max())
        times = highest / usual if usual else 0.0
        yield warn(
            f"Gradient explosions: up to {number(highest)} at step "
            f"{far.steps[np.argmax(far.values)]}, {number(times)} times the usual {number(usual)}.",
            id="explosion",
            steps=far.ends,
            value=times,
            limit=explosion,
            evidence=[f"{counted(len(far), 'point')}: {listed(map(str, far.steps.tolist()))}"],
            cause="A batch or a policy far from the usual makes very large gradients; an unclipped "
            "update then throws the weights further off.",
            remedy=[clip(run), lower_rate(run)],
        )


def _highest_median(series: Series) -> float:
    """Of the parts of a run: one in which it vanishes is no level to hold the others against."""
    return max(
        float(np.median(part)) for part in np.array_split(series.values, NUM_PARTS) if len(part)
    )


@finding("grad_vanish", "V12", "grad")
def vanishing_gradients(run: AnalysedRun, norms: Series) -> Iterator[Told]:
    """Against the run's own level of calm steps, and absolutely."""
    limits = run.limits
    before = _highest_so_far(norms)
    for each in (
        limits["grad_vanished_share"] * before,
        np.full(len(norms), limits["grad_vanished"]),
    ):
        gone = in_a_row(norms, norms.values < each)
        if len(gone) >= limits["grad_vanished_points"]:
            limit = float(each[np.searchsorted(norms.steps, gone.steps[0])])
            yield warn(
                f"The gradient vanishes: below {number(limit)} at {interval(gone.ends)}.",
                steps=gone.ends,
                value=np.median(gone.values),
                limit=limit,
                cause="Nothing left to learn, a loss without label tokens, dead or frozen layers, "
                "or underflow.",
                remedy="Check the labels and which parameters are trained; stop if the loss no "
                "longer falls.",
            )
            return


def _highest_so_far(norms: Series) -> Floats:
    """Of each point the highest usual level that the norm had before it; at the start that of
    the first points.
    """
    width = min(max(NUM_ENDS, len(norms) // NUM_WINDOWS), len(norms))
    stride = max(1, width // 8)
    levels = np.maximum.accumulate(rolling_median(norms.values, width, stride))
    return np.asarray(levels[((np.arange(len(norms)) - width) // stride).clip(0)])


@finding("grad_unclipped", "V13", "grad")
def unclipped(run: AnalysedRun, _: Series) -> Iterator[Told]:
    """Bursts that went into the weights; and a limit that sets the size of each step."""
    if not run.is_configured:
        raise NotJudged("the configuration is not known")
    met = [a for a in run.anomalies if is_of(a, "grad")]
    if met and not run.setting("clip"):
        yield warn(
            f"{counted(len(met), 'burst')} of the gradient went into the weights unclipped: "
            f"{run.facts['clip']}.",
            steps=(met[0].steps[0], met[-1].steps[1]),
            value=len(met),
            limit=0,
            evidence=[run.facts["clip"], run.facts["lr"]],
            cause="Without clipping one extreme batch moves all weights by a multiple of a usual "
            "step.",
            remedy=[clip(run)],
        )
    clipped, limit = run.find("clipped_steps"), run.limits["clipped_share"]
    if clipped is None:
        return
    late = run.late(clipped)
    if many := beyond(late, high=limit, width=len(late), of=np.mean):
        yield note(
            f"{share(many.level)} of the later updates were clipped: the limit sets the step size, "
            "not the learning rate.",
            id="clipped",
            metric=run.name("clipped_steps"),
            value=many.level,
            limit=limit,
            evidence=[run.facts["clip"]],
            cause="The clipping limit is below the usual gradient norm of this model and batch.",
            remedy=f"Nothing, where the loss falls steadily; else lower {run.options['lr']}, or "
            f"raise {run.options['clip']} above the usual norm.",
        )


@finding("lr_schedule", "V14", "lr")
def schedule(run: AnalysedRun, rates: Series) -> Iterator[Told]:
    """Where the rate leaves its schedule, does not warm up, jumps, or never falls."""
    if len(rates) < NUM_STRETCHES:
        raise NotJudged(f"{len(rates)} points of learning rate, {NUM_STRETCHES} are needed")
    told = learning_rate(rates, (), limits=run.limits, total_steps=run.total_steps)
    if told.raised:
        yield _raised(run, told)
    yield from _warmup(run, scheduled(rates, told.raised))
    if told.schedule == "unknown" and (at := _jump(run, rates, told.peak)) is not None:
        yield warn(
            f"The learning rate jumps at step {at} and follows no known schedule.",
            id="jumps",
            steps=(at, at),
            cause="A resume that restored another schedule, or a change by hand.",
            remedy="Compare the rate before and after each restart.",
        )
    is_wanted = "constant" in str(run.setting("schedule"))
    if told.schedule == "constant" and not is_wanted and run.last_step >= 0.9 * run.total_steps:
        yield note(
            f"The learning rate stays at {number(told.peak)} to the end.",
            id="decay",
            steps=rates.ends,
            value=told.last,
            evidence=[run.facts["schedule"]],
            cause="No schedule is set; without decay the weights keep moving with the last batches.",
            remedy=[decay(run)],
        )


def _raised(run: AnalysedRun, told: LearningRate) -> Told:
    """Where the rate was lifted off its schedule, and what followed."""
    worst = max(told.raised, key=lambda stretch: stretch.factor)
    where = listed(
        f"{interval(stretch.steps)}{'' if stretch.is_over else ', to the end'}"
        for stretch in told.raised
    )
    return warn(
        f"The learning rate jumps from {number(worst.level)} to {number(worst.peak)}, "
        f"{number(worst.factor)} times its schedule: {where}.",
        id="raised",
        steps=(told.raised[0].steps[0], told.raised[-1].steps[1]),
        value=worst.factor,
        limit=run.limits["lr_jump"],
        evidence=[
            f"{moved_along(a)} at {interval(a.steps)}" for a in run.anomalies if is_led_by_rate(a)
        ],
        cause="A scheduler that was changed or restored wrongly, a resume with other options, or a "
        "change by hand.",
        remedy=f"Find what set the rate at step {worst.steps[0]}; go back to a checkpoint before "
        "it and train on with the schedule unbroken.",
    )


def _warmup(run: AnalysedRun, rates: Series) -> Iterator[Told]:
    """Whether the rate rises as long as the configuration says; where that says nothing, up to
    its peak.
    """
    ratio = run.config("optim.lr_warmup_steps_ratio", "warmup_ratio", "warmup_steps_ratio")
    # of ours and verl's: null or -1 leave it to the share
    fixed = run.config("optim.lr_warmup_steps")
    steps = run.config("warmup_steps") or float(ratio or 0) * run.total_steps
    length = int(steps if fixed is None or int(fixed) < 0 else fixed)
    peak = int(np.argmax(rates.values >= rates.values.max() * (1 - 1e-6)))
    inside = (
        rates.values[rates.steps <= CERTAIN_WARMUP * length] if length else rates.values[: peak + 1]
    )
    rises = bool(np.all(np.diff(inside) > 0)) if length else bool(np.all(np.diff(inside) >= 0))
    if len(inside) < (3 if length else 2):
        return
    if rises:
        first, top = number(float(rates.values[0])), number(float(rates.values[peak]))
        yield in_order("rate_rises", f"{first} to {top} at {rates.steps[peak]}")
    elif length:
        yield warn(
            f"The learning rate does not rise in its warm-up of {length} steps.",
            id="warmup",
            steps=(int(rates.steps[0]), length),
            cause="The scheduler is not stepped, or was restored from another run.",
            remedy=f"Check {run.options['warmup']} and how often the scheduler is stepped.",
            line="rate_rises",
        )


def _jump(run: AnalysedRun, series: Series, peak: float) -> int | None:
    """The first step after the warm-up at which the rate moves further than a schedule does,
    unless it restarts.
    """
    if "restart" in str(run.setting("schedule")) or peak <= 0:
        return None
    moves = np.diff(series.values) / peak
    is_jump = (moves > run.limits["lr_jump_up"]) | (moves < -run.limits["lr_jump_down"])
    jumps = np.flatnonzero(is_jump & np.logical_or.accumulate(moves < 0))
    return int(series.steps[1 + jumps[0]]) if len(jumps) else None


@finding("lr_too_high", "V15", "lr")
def unstable_at_high_rate(run: AnalysedRun, rates: Series) -> Iterator[Told]:
    roles = ("loss", "grad", "kl", "update_kl")
    unstable = [a for a in run.anomalies if any(is_of(a, role) for role in roles)]
    if len(unstable) < MIN_OVERLAPS:
        return
    told = learning_rate(rates, unstable, limits=run.limits, total_steps=run.total_steps)
    part = told.anomalies_at_high_share or 0.0
    if part > run.limits["lr_overlap"]:
        yield warn(
            f"{share(part)} of the unstable intervals lie where the learning rate is at "
            f"{share(run.limits['lr_high'])} of its peak {number(told.peak)} or more: it is too "
            f"high for too long.",
            steps=(unstable[0].steps[0], unstable[-1].steps[1]),
            value=part,
            limit=run.limits["lr_overlap"],
            evidence=[
                f"schedule {told.schedule}, warm-up {told.warmup_steps} steps, last rate "
                f"{number(told.last)}",
                run.facts["lr"],
                run.facts["warmup"],
            ],
            cause=f"Updates are large while the run is unstable. {why_recovered(run)} "
            f"{how_common(run)}",
            remedy=[lower_rate(run), decay(run)],
        )


@finding("not_learning", "V44")
def learning(run: AnalysedRun) -> Iterator[Told]:
    """Whether anything that learning shows in changes at all; a controller also by its three
    results.
    """
    roles = ("loss", "val_loss", "reward", "accuracy", "violation", "grad")
    tracked = {run.name(role): series for role in roles if (series := run.find(role)) is not None}
    long = {key: series.values for key, series in tracked.items() if len(series) >= MIN_POINTS}
    if not long:
        raise NotJudged("no metric of learning with ten points")
    part = run.limits["constant_range"]
    if all(
        float(np.ptp(values)) <= part * abs(float(np.median(values))) for values in long.values()
    ):
        yield fail(
            f"Nothing changes: {listed(long)} {'is' if len(long) == 1 else 'are'} constant over "
            f"the run.",
            metric=next(iter(long)),
            value=0,
            limit=part,
            cause="No update reaches the weights, or no sample carries a signal.",
            remedy=f"Check that {run.options['lr']} is above 0, that parameters are trained, and "
            f"the labels.",
        )
    elif run.profile == "controller" and _never_got_better(run):
        yield fail(
            "Bad run: the reward stays below 0, the accuracy at 0 and most answers miss the budget "
            "throughout.",
            id="bad",
            metric=run.name("reward"),
            cause="The controller learns nothing: answers missing from the metadata, or unsuitable "
            "reward weights.",
            remedy="Check the answers field, generated texts and the metric, then the weights of "
            "the reward.",
        )


def _never_got_better(run: AnalysedRun) -> bool:
    reward, accuracy, violation = (run.find(role) for role in ("reward", "accuracy", "violation"))
    if (
        reward is None
        or accuracy is None
        or violation is None
        or len(run.epochs("reward")) < run.limits["min_epochs"]
    ):
        return False
    is_bad = reward.values.max() < 0 and accuracy.values.max() == 0
    return bool(is_bad and violation.values.min() > run.limits["violation"])
