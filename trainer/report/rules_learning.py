"""V04, V06, V09 and V44: whether anything is learnt, and which noise is normal."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.anomalies import is_of
from trainer.report.judge import Rule, found
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.sentence_parts import listed, number, percent
from trainer.report.statistics import bins, finite, noise, slope
from trainer.report.trends import phases

NUM_STRETCHES = 20
"""Parts the first steps are divided into when their trend is tested."""
MIN_POINTS = 10


def _not_falling(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("loss")
    p = run.limits["trend_p"]
    if len(series) < NUM_STRETCHES:
        raise NotJudged(f"{len(series)} points of loss, {NUM_STRETCHES} are needed")
    whole, before = slope(series), slope(_before_a_lasting_rise(run, series))
    if not whole.is_falling(p) and not before.is_falling(p):
        yield found(
            "warn",
            f"The loss does not fall over the whole run (p = {number(whole.p_value)}).",
            metric=run.name("loss"),
            steps=steps_of(series, 0, len(series)),
            value=whole.p_value,
            threshold=p,
            evidence=(f"trend {number(whole.change)} over the run, level {number(whole.level)}",),
            cause="The learning rate is too low or too high, or the labels carry nothing to learn.",
            remedy=f"Try {remedies.option(run, 'lr')} three times higher and lower for 100 steps; check the labels.",
        )
        return
    first = _first_steps(series, int(run.limits["first_steps"]))
    if len(first) >= NUM_STRETCHES and not (start := slope(bins(first, NUM_STRETCHES))).is_falling(p):
        yield found(
            "note",
            f"The loss does not fall yet in the first {int(run.limits['first_steps'])} steps, later it does.",
            metric=run.name("loss"),
            steps=steps_of(first, 0, len(first)),
            value=start.p_value,
            threshold=p,
            cause="A long warm-up, or noise larger than the progress of so few steps.",
            remedy="None needed where the rate was still warming up.",
            suffix="start",
        )


def _before_a_lasting_rise(run: AnalysedRun, series: Series) -> Series:
    """Up to the first interval from which the loss did not come back: what follows is a fault of that interval."""
    lasting = [a.steps[0] for a in run.anomalies if is_of(a, "loss") and not a.has_recovered]
    stop = int(np.searchsorted(series.steps, lasting[0])) if lasting else len(series)
    return Series(series.steps[:stop], series.values[:stop])


def _first_steps(series: Series, num_steps: int) -> Series:
    stop = int(np.searchsorted(series.steps, num_steps, side="right"))
    return Series(series.steps[:stop], series.values[:stop])


def _oscillating(run: AnalysedRun) -> Iterator[Finding]:
    series, trend = run.get("loss"), run.slope("loss")
    if trend.is_falling(run.limits["trend_p"]):
        return
    level = abs(float(np.median(series.values)))
    if run.profile == "controller":
        amplitude = float(np.quantile(series.values, 0.95) - np.quantile(series.values, 0.05)) / 2
        limit, size = run.limits["oscillation_range"], amplitude
    else:
        limit, size = run.limits["oscillation"], noise(series) / level if level else 0.0
    if size > limit:
        yield found(
            "warn",
            f"The loss swings violently ({number(size)}, limit {number(limit)}) without getting better.",
            metric=run.name("loss"),
            steps=steps_of(series, 0, len(series)),
            value=size,
            threshold=limit,
            cause="The learning rate is too large, or the batch too small.",
            remedy=f"{remedies.lower_rate(run)} {remedies.larger_batch(run)}",
        )


def _jitter(run: AnalysedRun) -> Iterator[Finding]:
    series, trend = run.get("loss"), run.slope("loss")
    size = noise(series)
    if run.profile == "controller":
        rewards = run.find("reward")
        improves = rewards is not None and slope(rewards).is_rising(run.limits["trend_p"])
        amount, better = number(size), "the rewards"
    else:
        level = abs(float(np.median(series.values)))
        size = size / level if level else 0.0
        improves = trend.is_falling(run.limits["trend_p"])
        amount, better = percent(size), "its means"
    if improves and size > run.limits["jitter"]:
        yield found(
            "info",
            f"The loss jitters by {amount} from point to point while {better} improve: that is normal.",
            metric=run.name("loss"),
            value=size,
            threshold=run.limits["jitter"],
            evidence=tuple(filter(None, [phases(run, "loss")])),
            cause="Samples of unlike difficulty, small batches, sampled groups, the early phase of training.",
            remedy=f"None needed. To smooth it: {remedies.larger_batch(run)} "
            + (remedies.larger_group(run) if run.profile in ("grpo", "controller") else ""),
        )


def _not_learning(run: AnalysedRun) -> Iterator[Finding]:
    keys = [run.key(role) for role in ("loss", "val_loss", "reward", "accuracy", "violation", "grad")]
    tracked = {key: finite(run.log.series[key]) for key in keys if key}
    long = {key: series for key, series in tracked.items() if len(series) >= MIN_POINTS}
    if not long:
        raise NotJudged("no metric of learning with ten points")
    if all(_is_constant(series, run.limits["constant_range"]) for series in long.values()):
        yield found(
            "fail",
            f"Nothing changes: {listed(long)} {'is' if len(long) == 1 else 'are'} constant over the run.",
            metric=next(iter(long)),
            value=0.0,
            threshold=run.limits["constant_range"],
            cause="No update reaches the weights, or no sample carries a signal.",
            remedy=f"Check that {remedies.option(run, 'lr')} is above 0, that parameters are trained, and the labels.",
        )
    elif run.profile == "controller" and _never_got_better(run):
        yield found(
            "fail",
            "Bad run: the reward stays below 0, the accuracy at 0 and most answers miss the budget throughout.",
            metric=run.name("reward"),
            cause="The controller learns nothing: answers missing from the metadata, or unsuitable reward weights.",
            remedy="Check the answers field, generated texts and the metric, then the weights of the reward.",
            suffix="bad",
        )


def _is_constant(series: Series, limit: float) -> bool:
    level = abs(float(np.median(series.values)))
    return float(np.ptp(series.values)) <= limit * level


def _never_got_better(run: AnalysedRun) -> bool:
    reward, accuracy, violation = (run.find(role) for role in ("reward", "accuracy", "violation"))
    if reward is None or accuracy is None or violation is None or len(reward) < run.limits["min_epochs"]:
        return False
    is_bad = reward.values.max() < 0 and accuracy.values.max() == 0
    return bool(is_bad and violation.values.min() > run.limits["violation"])


RULES = (
    Rule("V04", "loss_not_falling", _not_falling, ("loss",), ("sft", "generic")),
    Rule("V06", "loss_oscillating", _oscillating, ("loss",), ("sft", "generic", "controller")),
    Rule("V09", "jitter_normal", _jitter, ("loss",)),
    Rule("V44", "not_learning", _not_learning),
)
