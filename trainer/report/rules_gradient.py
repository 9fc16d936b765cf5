"""V10 to V15: the gradient norm and the learning rate."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.anomalies import is_of
from trainer.report.causes import how_common, is_led_by_rate, moved_along, why_recovered
from trainer.report.judge import Rule, found
from trainer.report.learning_rate import learning_rate
from trainer.report.result import Finding, RaisedRate
from trainer.report.sentence_parts import counted, listed, number, percent, span
from trainer.report.statistics import longest_run

CERTAIN_WARMUP = 0.9
"""Frameworks differ by a step or two in where a warm-up ends."""
MIN_OVERLAPS = 2
"""One anomaly at a high rate is chance."""


def _range(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("grad")
    low, high = run.limits["grad_low"], run.limits["grad_high"]
    share = float(((series.values < low) | (series.values > high)).mean())
    if share > run.limits["grad_share"]:
        median = float(np.median(series.values))
        yield found(
            "note",
            f"The gradient norm is outside {number(low)} to {number(high)} at {percent(share)} of the points.",
            metric=run.name("grad"),
            steps=steps_of(series, 0, len(series)),
            value=median,
            threshold=high if median > high else low,
            evidence=(f"median {number(median)}",),
            cause="An unusual scale of the loss or of the model; by itself no fault.",
            remedy="None needed where the loss falls steadily.",
        )


def _high(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("grad")
    if run.profile == "sft":
        start, stop = longest_run(series.values > run.limits["grad_unstable"])
        if stop - start >= run.limits["grad_unstable_points"]:
            yield found(
                "warn",
                f"The gradient norm stays above {number(run.limits['grad_unstable'])} for {stop - start} points.",
                metric=run.name("grad"),
                steps=steps_of(series, start, stop),
                value=float(series.values[start:stop].max()),
                threshold=run.limits["grad_unstable"],
                cause="Training is unstable: the learning rate is too high.",
                remedy=f"{remedies.lower_rate(run)} {remedies.clip(run)}",
                suffix="sustained",
            )
    median = float(np.median(series.values))
    limit = run.limits["grad_explosion"]
    where = np.flatnonzero(series.values > limit * median)
    if median > 0 and len(where):
        peak = int(np.argmax(series.values))
        yield found(
            "warn",
            f"Gradient explosions: up to {number(series.values[peak])} at step {series.steps[peak]}, "
            f"{number(series.values[peak] / median)} times the usual {number(median)}.",
            metric=run.name("grad"),
            steps=(int(series.steps[where[0]]), int(series.steps[where[-1]])),
            value=float(series.values[peak] / median),
            threshold=limit,
            evidence=(f"{counted(len(where), 'point')}: {listed(str(s) for s in series.steps[where].tolist())}",),
            cause="A batch or a policy far from the usual makes very large gradients; an unclipped update then throws "
            "the weights further off.",
            remedy=f"{remedies.clip(run)} {remedies.lower_rate(run)}",
            suffix="explosion",
        )


def _vanishing(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("grad")
    limit = max(run.limits["grad_vanished"], run.limits["grad_vanished_share"] * float(np.median(series.values)))
    start, stop = longest_run(series.values < limit)
    if stop - start >= run.limits["grad_vanished_points"]:
        yield found(
            "warn",
            f"The gradient vanishes: below {number(limit)} at {span(steps_of(series, start, stop))}.",
            metric=run.name("grad"),
            steps=steps_of(series, start, stop),
            value=float(np.median(series.values[start:stop])),
            threshold=limit,
            cause="Nothing left to learn, a loss without label tokens, dead or frozen layers, or underflow.",
            remedy="Check the labels and which parameters are trained; stop if the loss no longer falls.",
        )


def _unclipped(run: AnalysedRun) -> Iterator[Finding]:
    bursts = [a for a in run.anomalies if is_of(a, "grad")]
    clip = remedies.value(run, "clip")
    if bursts and remedies.is_known(run) and not clip:
        yield found(
            "warn",
            f"{counted(len(bursts), 'burst')} of the gradient went into the weights unclipped: "
            f"{remedies.fact(run, 'clip')}.",
            metric=run.name("grad"),
            steps=(bursts[0].steps[0], bursts[-1].steps[1]),
            value=float(len(bursts)),
            threshold=0.0,
            evidence=(remedies.fact(run, "clip"), remedies.fact(run, "lr")),
            cause="Without clipping one extreme batch moves all weights by a multiple of a usual step.",
            remedy=remedies.clip(run),
        )
    share = _clipped_share(run, clip)
    if share is not None and share > run.limits["clipped_share"]:
        yield found(
            "note",
            f"{percent(share)} of the later updates were clipped: the limit sets the step size, not the learning rate.",
            metric=run.name("grad"),
            value=share,
            threshold=run.limits["clipped_share"],
            evidence=(remedies.fact(run, "clip"),),
            cause="The clipping limit is below the usual gradient norm of this model and batch.",
            remedy=f"Nothing, where the loss falls steadily; else lower {remedies.option(run, 'lr')}, or raise "
            f"{remedies.option(run, 'clip')} above the median norm {number(float(np.median(run.get('grad').values)))}.",
            suffix="clipped",
        )
    if not remedies.is_known(run) and share is None:
        raise NotJudged("the configuration is not known, nor how many updates were clipped")


def _clipped_share(run: AnalysedRun, clip: object) -> float | None:
    """Share of updates clipped in the second half, after the large first gradients; by norm and limit, or as logged."""
    norms = run.get("grad").values
    if len(norms) < run.limits["min_points"]:
        return None
    if isinstance(clip, int | float) and clip > 0:
        return float((norms[len(norms) // 2 :] > clip).mean())
    if (logged := run.find("clipped_steps")) is not None:
        return float(logged.values[len(logged) // 2 :].mean())
    return None


def _schedule(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("lr")
    if len(series) < 20:
        raise NotJudged(f"{len(series)} points of learning rate, 20 are needed")
    told = learning_rate(series, (), limits=run.limits, total_steps=run.total_steps)
    steps = steps_of(series, 0, len(series))
    if told.raised:
        yield _raised(run, told.raised)
    if (rise := _broken_warmup(run)) is not None:
        yield found(
            "warn",
            f"The learning rate does not rise in its warm-up of {rise} steps.",
            metric=run.name("lr"),
            steps=(int(series.steps[0]), rise),
            cause="The scheduler is not stepped, or was restored from another run.",
            remedy=f"Check {remedies.option(run, 'warmup')} and how often the scheduler is stepped.",
            suffix="warmup",
        )
    if told.schedule == "unknown" and (at := _jump(run, told.peak)) is not None:
        yield found(
            "warn",
            f"The learning rate jumps at step {at} and follows no known schedule.",
            metric=run.name("lr"),
            steps=(at, at),
            cause="A resume that restored another schedule, or a change by hand.",
            remedy="Compare the rate before and after each restart.",
            suffix="jumps",
        )
    is_wanted = "constant" in str(remedies.value(run, "schedule"))
    if told.schedule == "constant" and not is_wanted and run.last_step >= 0.9 * run.total_steps:
        yield found(
            "warn",
            f"The learning rate stays at {number(told.peak)} to the end.",
            metric=run.name("lr"),
            steps=steps,
            value=told.last,
            evidence=(remedies.fact(run, "schedule"),),
            cause="No schedule is set; without decay the weights keep moving with the last batches.",
            remedy=remedies.decay(run),
            suffix="decay",
        )


def _jump(run: AnalysedRun, peak: float) -> int | None:
    """The first step at which the rate moves further than a schedule does; restarts that were asked for are none."""
    series = run.get("lr")
    if "restart" in str(remedies.value(run, "schedule")) or peak <= 0:
        return None
    start = int(np.argmax(series.values >= peak * (1 - 1e-6)))
    moves = np.diff(series.values[start:]) / peak
    jumps = np.flatnonzero((moves > run.limits["lr_jump_up"]) | (moves < -run.limits["lr_jump_down"]))
    return int(series.steps[start + 1 + jumps[0]]) if len(jumps) else None


def _raised(run: AnalysedRun, stretches: tuple[RaisedRate, ...]) -> Finding:
    """Where the rate was lifted off its schedule, and what followed."""
    worst = max(stretches, key=lambda stretch: stretch.factor)
    where = listed(f"{span(stretch.steps)}{'' if stretch.is_over else ', to the end'}" for stretch in stretches)
    followed = [
        f"{moved_along(anomaly)} at {span(anomaly.steps)}" for anomaly in run.anomalies if is_led_by_rate(anomaly)
    ]
    return found(
        "warn",
        f"The learning rate jumps from {number(worst.level)} to {number(worst.peak)}, {number(worst.factor)} times its "
        f"schedule: {where}.",
        metric=run.name("lr"),
        steps=(stretches[0].steps[0], stretches[-1].steps[1]),
        value=worst.factor,
        threshold=run.limits["lr_jump"],
        evidence=tuple(followed),
        cause="A scheduler that was changed or restored wrongly, a resume with other options, or a change by hand.",
        remedy=f"Find what set the rate at step {worst.steps[0]}; go back to a checkpoint before it and train on with "
        "the schedule unbroken.",
        suffix="raised",
    )


def _broken_warmup(run: AnalysedRun) -> int | None:
    """The configured warm-up in steps, if the rate does not rise during it."""
    ratio = run.config("optim.lr_warmup_steps_ratio", "warmup_ratio", "warmup_steps_ratio")
    steps = run.config("warmup_steps")
    length = int(steps) if steps else int(float(ratio or 0) * run.total_steps)
    series = run.get("lr")
    inside = series.values[series.steps <= CERTAIN_WARMUP * length]
    return length if len(inside) >= 3 and not np.all(np.diff(inside) > 0) else None


def _too_high(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("lr")
    unstable = [a for a in run.anomalies if any(is_of(a, role) for role in ("loss", "grad", "kl"))]
    if len(unstable) < MIN_OVERLAPS:
        return
    told = learning_rate(series, unstable, limits=run.limits, total_steps=run.total_steps)
    share = told.anomalies_at_high_share or 0.0
    if share > run.limits["lr_overlap"]:
        yield found(
            "warn",
            f"{percent(share)} of the unstable intervals lie where the learning rate is at "
            f"{percent(run.limits['lr_high'])} of its peak {number(told.peak)} or more: it is too high for too long.",
            metric=run.name("lr"),
            steps=(unstable[0].steps[0], unstable[-1].steps[1]),
            value=share,
            threshold=run.limits["lr_overlap"],
            evidence=(
                f"schedule {told.schedule}, warm-up {told.warmup_steps} steps, last rate {number(told.last)}",
                remedies.fact(run, "lr"),
                remedies.fact(run, "warmup"),
            ),
            cause=f"Updates are large while the run is unstable. {why_recovered(run)} {how_common(run)}",
            remedy=f"{remedies.lower_rate(run)} {remedies.decay(run)}",
        )


RULES = (
    Rule("V10", "grad_range", _range, ("grad",), ("sft",)),
    Rule("V11", "grad_high", _high, ("grad",)),
    Rule("V12", "grad_vanish", _vanishing, ("grad",)),
    Rule("V13", "grad_unclipped", _unclipped, ("grad",)),
    Rule("V14", "lr_schedule", _schedule, ("lr",)),
    Rule("V15", "lr_too_high", _too_high, ("lr",)),
)
