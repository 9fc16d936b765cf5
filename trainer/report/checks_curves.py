"""What is measured of the loss, the gradient norm and the learning rate, beyond what rows of the table say."""

from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.anomalies import is_of
from trainer.report.formatting import interval, listed, number
from trainer.report.inventory import phases
from trainer.report.learning_rate import learning_rate, scheduled
from trainer.report.measures import Measure, going_wrong
from trainer.report.result import LearningRate
from trainer.report.run_log import Series
from trainer.report.statistics import NUM_BINS, Shift, bins, level_shift, noise, slope, within
from trainer.report.vocabulary import ROLES
from trainer.report.words import is_led_by_rate, moved_along

NUM_RECENT, NUM_BEST = 32, 64
"""Points whose median is the present level of a loss, and the best level so far."""
NUM_EARLY, NUM_LEVEL = 96, 5
"""Points in which a rise is one of the first steps, and of the level before it."""
SIGMA = 4
HIDING = ("transformers", "llama-factory", "ms-swift")
"""Trainers that by default log the running mean in place of a NaN loss."""
NUM_STRETCHES = 20
"""Parts the first steps are divided into when their trend is tested; points that a rate is judged by."""
MIN_POINTS = 10
CERTAIN_WARMUP = 0.9
"""Frameworks differ by a step or two in where a warm-up ends."""
MIN_OVERLAPS = 2
"""One anomaly at a high rate is chance."""


def nonfinite(run: AnalysedRun) -> Iterator[Measure]:
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
        hint = "This framework may log the running mean in place of a NaN loss: the norm shows it." if hides else ""
        words = {"count": len(every), "first": every[0], "all": every, "hint": hint}
        metric = key if len(steps[key]) else norm
        yield Measure(value=float(len(every)), steps=(every[0], every[-1]), words=words, metric=metric)


def falling(run: AnalysedRun) -> Iterator[Measure]:
    """Over the run, up to a rise that did not pass, which is a fault of its own; and in the first steps."""
    series, p = run.get("loss"), run.limits["trend_p"]
    if len(series) < NUM_STRETCHES:
        raise NotJudged(f"{len(series)} points of loss, {NUM_STRETCHES} are needed")
    whole, lasting = slope(series), [a.steps[0] for a in run.anomalies if is_of(a, "loss") and not a.has_recovered]
    before = within(series, 0, lasting[0] - 1) if lasting else series
    has_fallen = whole.is_falling(p) or slope(before).is_falling(p)
    so_far = f"the first {run.last_step} steps" if run.last_step < run.total_steps else "the whole run"
    words = {"change": whole.change, "level": whole.level, "so_far": so_far}
    is_excused = _is_warming_up(run) or _early_rise(run, series) is not None
    yield Measure(value=whole.p_value, steps=series.ends, words=words, is_fault=not (has_fallen or is_excused))
    first = within(series, 0, run.limits["first_steps"])
    if len(first) >= NUM_STRETCHES:
        trend, quarter = slope(bins(first, NUM_STRETCHES)), len(first) // 4
        levels = {"before": np.median(first.values[:quarter]), "after": np.median(first.values[-quarter:])}
        yield Measure("start", trend.p_value, first.ends, levels, is_fault=not trend.is_falling(p))


def _is_warming_up(run: AnalysedRun) -> bool:
    """Whether the run goes on and its learning rate has risen up to now."""
    rates = run.find("lr")
    return rates is not None and run.last_step < run.total_steps and int(np.argmax(rates.values)) == len(rates) - 1 > 0


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
    """A rise in the first steps, from a level that later ones never see again: the rate was too high from the start."""
    if len(series) < 2 * NUM_EARLY or series.values.min() <= 0:
        return None
    rise = _rise(run, series, (NUM_LEVEL, NUM_EARLY))
    is_early = rise is not None and rise.is_lasting and rise.delay <= NUM_RECENT + NUM_LEVEL
    return rise if is_early else None


def diverging(run: AnalysedRun) -> Iterator[Measure]:
    """A lasting rise over the best level so far; for epochs the rule that stops a run."""
    series = run.get("loss")
    early = _early_rise(run, series)
    rise = early
    if early is None and np.median(series.values) > 0 and len(series) >= 2 * NUM_BEST:
        rise = _rise(run, series, (NUM_BEST, len(series)))
    is_early = rise is not None and rise.steps[0] <= series.steps[:NUM_EARLY].max()  # no level was there to rise from
    if rise is not None and (rise.is_lasting or not is_early):
        words = {"onset": rise.steps[0], "last": rise.steps[1], "checkpoint": run.checkpoint(rise.calm)}
        words |= {"before": rise.before, "after": rise.after}
        row = "early" if early else "main" if rise.is_lasting else "passed"
        yield Measure(row, rise.after / rise.before, rise.steps, words)
    if run.profile == "controller" or (run.find("epoch") is not None and len(run.epochs("loss")) != NUM_BINS):
        yield from going_wrong(run, "loss", "epochs", good=-1)


def oscillating(run: AnalysedRun) -> Iterator[Measure]:
    """Noise against the level; of a controller's loss, which has no level, how far it swings."""
    series, limit = run.get("loss"), run.limits["oscillation"]
    size = _relative_noise(series)
    if run.profile == "controller":
        limit, (low, high) = run.limits["oscillation_range"], np.quantile(series.values, (0.05, 0.95))
        size = float(high - low) / 2
    is_fault = size > limit and not run.slope("loss").is_falling(run.limits["trend_p"])
    yield Measure(value=size, steps=series.ends, limit=limit, is_fault=is_fault)


def jitter(run: AnalysedRun) -> Iterator[Measure]:
    """Noise from point to point while the run improves: by its rewards where it is a controller."""
    series, rewards, p = run.get("loss"), run.find("reward"), run.limits["trend_p"]
    if run.profile == "controller":
        row, size, improves = "controller", noise(series), rewards is not None and slope(rewards).is_rising(p)
    else:
        row = "groups" if run.profile == "grpo" else "main"
        size, improves = _relative_noise(series), run.slope("loss").is_falling(p)
    if improves and size > run.limits["jitter"]:
        yield Measure(row, size, words={"phases": phases(run, "loss")})


def _relative_noise(series: Series) -> float:
    level = abs(float(np.median(series.values)))
    return noise(series) / level if level else 0.0


def loss_spikes(run: AnalysedRun) -> Iterator[Measure]:
    spikes = [a for a in run.anomalies if is_of(a, "loss")]
    if not spikes:
        return
    peak = max((m for a in spikes for m in a.movers if m.metric in ROLES["loss"]), key=lambda mover: mover.peak_value)
    level = abs(float(np.median(run.get("loss").values)))
    is_extreme = level > 0 and peak.peak_value > run.limits["loss_extreme"] * level
    words = {
        "count": len(spikes),
        "peak": peak.peak_value,
        "at": peak.peak_step,
        "extreme": f", {number(peak.peak_value / level)} times the usual loss" if is_extreme else "",
        "places": [f"{a.peak_step} ({a.percent:.1f} %)" for a in spikes],
        "recovered": sum(a.has_recovered for a in spikes),
    }
    row = "led" if all(is_led_by_rate(a) for a in spikes) else "main"
    limit = run.limits["loss_z" if peak.z > run.limits["loss_z"] else "metric_z"]
    yield Measure(row, peak.z, (spikes[0].steps[0], spikes[-1].steps[1]), words, limit=limit)


def learning(run: AnalysedRun) -> Iterator[Measure]:
    """Whether anything that learning shows in changes at all; a controller also by its three results."""
    roles = ("loss", "val_loss", "reward", "accuracy", "violation", "grad")
    tracked = {run.name(role): series for role in roles if (series := run.find(role)) is not None}
    long = {key: series.values for key, series in tracked.items() if len(series) >= MIN_POINTS}
    if not long:
        raise NotJudged("no metric of learning with ten points")
    share = run.limits["constant_range"]
    if all(float(np.ptp(values)) <= share * abs(float(np.median(values))) for values in long.values()):
        constant = f"{listed(long)} {'is' if len(long) == 1 else 'are'} constant"
        yield Measure(value=0.0, words={"constant": constant}, metric=next(iter(long)))
    elif run.profile == "controller" and _never_got_better(run):
        yield Measure("bad")


def _never_got_better(run: AnalysedRun) -> bool:
    reward, accuracy, violation = (run.find(role) for role in ("reward", "accuracy", "violation"))
    if reward is None or accuracy is None or violation is None or len(reward) < run.limits["min_epochs"]:
        return False
    is_bad = reward.values.max() < 0 and accuracy.values.max() == 0
    return bool(is_bad and violation.values.min() > run.limits["violation"])


def unclipped(run: AnalysedRun) -> Iterator[Measure]:
    """Bursts that went into the weights."""
    if not run.is_configured:
        raise NotJudged("the configuration is not known")
    bursts = [a for a in run.anomalies if is_of(a, "grad")]
    if bursts and not run.setting("clip"):
        steps = bursts[0].steps[0], bursts[-1].steps[1]
        yield Measure(value=float(len(bursts)), steps=steps, words={"count": len(bursts)})


def schedule(run: AnalysedRun) -> Iterator[Measure]:
    """Where the rate leaves its schedule, does not warm up, jumps, or never falls."""
    series = run.get("lr")
    if len(series) < NUM_STRETCHES:
        raise NotJudged(f"{len(series)} points of learning rate, {NUM_STRETCHES} are needed")
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
    where = [f"{interval(stretch.steps)}{'' if stretch.is_over else ', to the end'}" for stretch in told.raised]
    words = {"level": worst.level, "peak": worst.peak, "where": where, "at": worst.steps[0]}
    followed = tuple(f"{moved_along(a)} at {interval(a.steps)}" for a in run.anomalies if is_led_by_rate(a))
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
