"""What is measured of the loss: whether it is a number, falls, stays down, swings, and whether anything is learnt."""

import math
from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import AnalysedRun, Measure, NotJudged, going_wrong
from trainer.report.anomalies import is_of
from trainer.report.formatting import listed, number
from trainer.report.inventory import phases
from trainer.report.result import Anomaly, Mover
from trainer.report.run_log import Series
from trainer.report.statistics import NUM_BINS, bins, longest_run, noise, onset, rolling_median, slope, within
from trainer.report.words import is_led_by_rate

MAX_WINDOWS = 20_000
NUM_EARLY, NUM_LEVEL, NUM_RECENT = 96, 5, 32
"""Points in which a rise is one of the first steps, of the level before it, and of a level after it."""
NUM_SIGMA = 4
HIDING = ("transformers", "llama-factory", "ms-swift")
"""Trainers that by default log the running mean in place of a NaN loss."""
NUM_STRETCHES = 20
"""Parts the first steps are divided into when their trend is tested."""
MIN_POINTS = 10


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


def zero_losses(run: AnalysedRun) -> Iterator[Measure]:
    series = run.get("loss")
    zeros = series.values == 0
    if (count := int(zeros.sum())) >= run.limits["zero_points"]:
        row = "groups" if run.profile == "controller" else "main"
        yield Measure(row, float(count), series[slice(*longest_run(zeros))].ends, {"count": count})


def falling(run: AnalysedRun) -> Iterator[Measure]:
    """Over the run, up to a rise that did not pass, which is a fault of its own; and in the first steps."""
    series, p = run.get("loss"), run.limits["trend_p"]
    if len(series) < NUM_STRETCHES:
        raise NotJudged(f"{len(series)} points of loss, {NUM_STRETCHES} are needed")
    whole, lasting = slope(series), [a.steps[0] for a in run.anomalies if is_of(a, "loss") and not a.has_recovered]
    before = within(series, 0, lasting[0] - 1) if lasting else series
    so_far = f"the first {run.last_step} steps" if run.last_step < run.total_steps else "the whole run"
    yield Measure(
        value=whole.p_value,
        steps=series.ends,
        words={"change": whole.change, "level": whole.level, "so_far": so_far},
        is_fault=not (whole.is_falling(p) or slope(before).is_falling(p) or _is_warming_up(run))
        and _early_rise(run, series) is None,
    )
    first = within(series, 0, run.limits["first_steps"])
    if len(first) >= NUM_STRETCHES:
        trend, quarter = slope(bins(first, NUM_STRETCHES)), len(first) // 4
        levels = {"before": np.median(first.values[:quarter]), "after": np.median(first.values[-quarter:])}
        steps = first.ends
        yield Measure("start", trend.p_value, steps, levels, is_fault=not trend.is_falling(p))


def _is_warming_up(run: AnalysedRun) -> bool:
    """Whether the run goes on and its learning rate has risen up to now."""
    rates = run.find("lr")
    return rates is not None and run.last_step < run.total_steps and int(np.argmax(rates.values)) == len(rates) - 1 > 0


def diverging(run: AnalysedRun) -> Iterator[Measure]:
    """A lasting rise over the best level so far; for epochs the rule that stops a run."""
    series = run.get("loss")
    if (rise := _early_rise(run, series)) is not None:
        yield rise
    elif (episode := _divergence(run, series)) is not None:
        calm, start, stop, ratio = episode
        steps = series[start:stop].ends
        good = run.checkpoint(int(series.steps[calm]))
        words = {"onset": steps[0], "last": steps[1], "checkpoint": good}
        yield Measure("passed" if stop < len(series) else "main", ratio, steps, words)
    if run.profile == "controller" or (run.find("epoch") is not None and len(run.epochs("loss")) != NUM_BINS):
        yield from going_wrong(run, "loss", "epochs", good=-1)


def _early_rise(run: AnalysedRun, series: Series) -> Measure | None:
    """A rise in the first steps, from a level that later ones never see again: the rate was too high from the start."""
    values = series.values
    if len(values) < 2 * NUM_EARLY or values.min() <= 0:
        return None
    levels = rolling_median(values[:NUM_EARLY], NUM_LEVEL, 1)
    best = float(levels.min())
    chance = NUM_SIGMA * 1.25 * noise(series) / math.sqrt(NUM_LEVEL)
    first = int(np.flatnonzero(levels <= best + chance / NUM_SIGMA)[-1]) + NUM_LEVEL - 1
    later = rolling_median(values[first:], NUM_RECENT, max(1, len(series) // MAX_WINDOWS))
    least = max(run.limits["diverging_ratio"] * best, best + max(run.limits["diverging_rise"], chance))
    if later.min() <= least:
        return None
    words = {"onset": int(series.steps[first]), "before": best, "after": later.max()}
    return Measure("early", float(later.max() / best), series[first:].ends, words)


def _divergence(run: AnalysedRun, series: Series) -> tuple[int, int, int, float] | None:
    """(surely before it, onset, end, ratio) of the longest stretch with the recent median far above the best one."""
    if len(series) < 128 or np.median(series.values) <= 0:
        return None
    stride = max(1, len(series) // MAX_WINDOWS)
    recent = rolling_median(series.values, 32, stride)
    best = np.minimum.accumulate(rolling_median(series.values, 64, stride))
    ends = np.arange(len(recent)) * stride + 32
    best_before = best[((ends - 96) // stride).clip(min=0)]
    is_high = (recent > run.limits["diverging_ratio"] * best_before) & (ends >= 96) & (best_before > 0)
    chance = NUM_SIGMA * 1.25 * noise(series) / math.sqrt(32)  # a median of 32 points strays by this without any cause
    is_high &= recent - best_before > max(run.limits["diverging_rise"], chance)
    start, stop = longest_run(is_high)
    if (stop - start) * stride < run.limits["diverging_points"]:
        return None
    ratio = float((recent[start:stop] / best_before[start:stop]).max())
    # a rise is certain only long after it has begun: it is looked for from the last window at the best level on
    at_best = np.flatnonzero(recent[: start + 1] <= best_before[start] + chance / NUM_SIGMA)
    low, certain = int(ends[at_best[-1] if len(at_best) else start]) - 32, int(ends[start])
    last = len(series) if stop == len(recent) else int(ends[stop - 1])
    first = onset(series.values, max(0, low - 64), min(2 * certain - low, last))
    return min(low, first), first, last, ratio


def oscillating(run: AnalysedRun) -> Iterator[Measure]:
    """Noise against the level; of a controller's loss, which has no level, how far it swings."""
    series, limit, size = run.get("loss"), run.limits["oscillation"], _relative_noise(run.get("loss"))
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
    peak = max((_mover_of_loss(a) for a in spikes), key=lambda mover: mover.peak_value)
    level = abs(float(np.median(run.get("loss").values)))
    is_extreme = level > 0 and peak.peak_value > run.limits["loss_extreme"] * level
    yield Measure(
        "led" if all(is_led_by_rate(a) for a in spikes) else "main",
        peak.z,
        (spikes[0].steps[0], spikes[-1].steps[1]),
        {
            "count": len(spikes),
            "peak": peak.peak_value,
            "at": peak.peak_step,
            "extreme": f", {number(peak.peak_value / level)} times the usual loss" if is_extreme else "",
            "places": [f"{a.peak_step} ({a.percent:.1f} %)" for a in spikes],
            "recovered": sum(a.has_recovered for a in spikes),
        },
        limit=run.limits["loss_z" if peak.z > run.limits["loss_z"] else "metric_z"],
    )


def _mover_of_loss(anomaly: Anomaly) -> Mover:
    return next(mover for mover in anomaly.movers if mover.metric in ("train/loss", "loss"))


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
