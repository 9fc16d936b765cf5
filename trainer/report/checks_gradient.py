"""What is measured of the gradient norm and of the learning rate."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trainer.report.analysed_run import AnalysedRun, Measure, NotJudged, beyond, stretch
from trainer.report.anomalies import is_of
from trainer.report.formatting import span
from trainer.report.learning_rate import learning_rate, scheduled
from trainer.report.result import LearningRate
from trainer.report.run_log import Series
from trainer.report.statistics import within
from trainer.report.words import is_led_by_rate, moved_along

CERTAIN_WARMUP = 0.9
"""Frameworks differ by a step or two in where a warm-up ends."""
MIN_OVERLAPS = 2
"""One anomaly at a high rate is chance."""
MIN_RATES = 20
NUM_PARTS = 3
"""Parts of a run with a usual norm of their own: one that vanishes early is no level to hold the others against."""
MIN_FIRST = 8


def gradient_range(run: AnalysedRun) -> Iterator[Measure]:
    """The share of points outside the usual range: of the run, and of its first steps."""
    series = run.get("grad")
    low, high = run.limits["grad_low"], run.limits["grad_high"]
    for row, part in (("main", series), ("start", within(series, 0, run.limits["first_steps"]))):
        if row == "main" or len(part) >= MIN_FIRST:
            median = float(np.median(part.values))
            share = float(((part.values < low) | (part.values > high)).mean())
            yield Measure(
                row,
                median,
                part.ends,
                {"share": share, "inside": 1 - share},
                limit=high if median > high else low,
                is_fault=share > run.limits["grad_share"],
            )


def high_gradients(run: AnalysedRun) -> Iterator[Measure]:
    """For long above a fixed level, which holds for fine-tuning; and far above the run's own level."""
    series, limits = run.get("grad"), run.limits
    if run.profile == "sft":
        is_high = series.values > limits["grad_unstable"]
        yield from stretch(series, is_high, "sustained", limits["grad_unstable_points"], "highest")
    if (usual := float(np.median(series.values))) > 0:
        is_far = series.values > limits["grad_explosion"] * _highest_median(series)
        yield from beyond(series, is_far, "explosion", usual=usual)


def _highest_median(series: Series) -> float:
    """Of the run's parts."""
    return max(float(np.median(part)) for part in np.array_split(series.values, NUM_PARTS) if len(part))


def vanishing_gradients(run: AnalysedRun) -> Iterator[Measure]:
    series, limits = run.get("grad"), run.limits
    limit = max(limits["grad_vanished"], limits["grad_vanished_share"] * _highest_median(series))
    for measure in stretch(series, series.values < limit, "main", limits["grad_vanished_points"], "median"):
        yield replace(measure, limit=limit)


def clipping(run: AnalysedRun) -> Iterator[Measure]:
    """Bursts that went into the weights, and how many of the later updates were clipped."""
    bursts = [a for a in run.anomalies if is_of(a, "grad")]
    clip = run.setting("clip")
    if bursts and run.is_configured and not clip:
        steps = bursts[0].steps[0], bursts[-1].steps[1]
        yield Measure(value=float(len(bursts)), steps=steps, words={"count": len(bursts)})
    norms, logged = run.get("grad").values, run.find("clipped_steps")
    share = None
    if len(norms) >= run.limits["min_points"]:  # the second half: first gradients are large
        if isinstance(clip, int | float) and clip > 0:
            share = float((norms[len(norms) // 2 :] > clip).mean())
        elif logged is not None:
            share = float(logged.values[len(logged) // 2 :].mean())
    if share is not None:
        yield Measure("clipped", share, is_fault=share > run.limits["clipped_share"])
    elif not run.is_configured:
        raise NotJudged("the configuration is not known, nor how many updates were clipped")


def schedule(run: AnalysedRun) -> Iterator[Measure]:
    """Where the rate leaves its schedule, does not warm up, jumps, or never falls."""
    series = run.get("lr")
    if len(series) < MIN_RATES:
        raise NotJudged(f"{len(series)} points of learning rate, {MIN_RATES} are needed")
    told = learning_rate(series, (), limits=run.limits, total_steps=run.total_steps)
    if told.raised:
        yield _raised(run, told)
    yield from _warmup(run, scheduled(series, told.raised))
    if told.schedule == "unknown" and (at := _jump(run, series, told.peak)) is not None:
        yield Measure("jumps", steps=(at, at))
    is_wanted = "constant" in str(run.setting("schedule"))
    if told.schedule == "constant" and not is_wanted and run.last_step >= 0.9 * run.total_steps:
        yield Measure("decay", told.last, series.ends, {"peak": told.peak})


def _raised(run: AnalysedRun, told: LearningRate) -> Measure:
    """Where the rate was lifted off its schedule, and what followed."""
    worst = max(told.raised, key=lambda stretch: stretch.factor)
    where = [f"{span(stretch.steps)}{'' if stretch.is_over else ', to the end'}" for stretch in told.raised]
    words = {"level": worst.level, "peak": worst.peak, "where": where, "at": worst.steps[0]}
    followed = tuple(f"{moved_along(a)} at {span(a.steps)}" for a in run.anomalies if is_led_by_rate(a))
    return Measure("raised", worst.factor, (told.raised[0].steps[0], told.raised[-1].steps[1]), words, followed)


def _warmup(run: AnalysedRun, rates: Series) -> Iterator[Measure]:
    """Whether the rate rises as long as the configuration says; where that says nothing, up to its peak."""
    ratio = run.config("optim.lr_warmup_steps_ratio", "warmup_ratio", "warmup_steps_ratio")
    fixed = run.config("optim.lr_warmup_steps")  # of ours and verl's: null or -1 leave it to the share
    share = run.config("warmup_steps") or float(ratio or 0) * run.total_steps
    length = int(share if fixed is None or int(fixed) < 0 else fixed)
    peak = int(np.argmax(rates.values >= rates.values.max() * (1 - 1e-6)))
    inside = rates.values[rates.steps <= CERTAIN_WARMUP * length] if length else rates.values[: peak + 1]
    rises = bool(np.all(np.diff(inside) > 0)) if length else bool(np.all(np.diff(inside) >= 0))
    if len(inside) >= (3 if length else 2) and (length or rises):
        words = {"length": length, "first": rates.values[0], "peak": rates.values[peak], "at": rates.steps[peak]}
        yield Measure("warmup", steps=(int(rates.steps[0]), length), words=words, is_fault=not rises)


def _jump(run: AnalysedRun, series: Series, peak: float) -> int | None:
    """The first step after the warm-up at which the rate moves further than a schedule does, unless it restarts."""
    if "restart" in str(run.setting("schedule")) or peak <= 0:
        return None
    moves = np.diff(series.values) / peak
    is_jump = (moves > run.limits["lr_jump_up"]) | (moves < -run.limits["lr_jump_down"])
    jumps = np.flatnonzero(is_jump & np.logical_or.accumulate(moves < 0))
    return int(series.steps[1 + jumps[0]]) if len(jumps) else None


def unstable_at_high_rate(run: AnalysedRun) -> Iterator[Measure]:
    unstable = [a for a in run.anomalies if any(is_of(a, role) for role in ("loss", "grad", "kl"))]
    if len(unstable) < MIN_OVERLAPS:
        return
    told = learning_rate(run.get("lr"), unstable, limits=run.limits, total_steps=run.total_steps)
    share = told.anomalies_at_high_share or 0.0
    if share > run.limits["lr_overlap"]:
        words = {"peak": told.peak, "schedule": told.schedule, "warmup": told.warmup_steps, "last": told.last}
        yield Measure(value=share, steps=(unstable[0].steps[0], unstable[-1].steps[1]), words=words)
