"""V30 to V34, V37, V38 and V41: what a policy that generates does to lengths, KL, ratios and advantages."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.causes import how_common, moved_along, story, why_recovered
from trainer.report.judge import Rule, found
from trainer.report.result import Anomaly, Finding, Mover
from trainer.report.sentence_parts import counted, listed, number, percent, span
from trainer.report.statistics import bins, longest_run
from trainer.report.vocabulary import meaning

CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_RISE = 1e-9
NUM_SMOOTH = 3
"""Points whose median stands for the present length of a generating policy."""


def _length_shift(run: AnalysedRun) -> Iterator[Finding]:
    """The present median against that of the 50 steps before."""
    series = run.get("mean_length")
    width = int(np.searchsorted(series.steps, series.steps[0] + run.limits["length_steps"]))
    smooth = NUM_SMOOTH if run.profile == "grpo" else width
    if width < NUM_SMOOTH or len(series) < 2 * width + smooth:
        raise NotJudged("too few points of length")
    stride = max(1, len(series) // 20_000)
    windows = np.lib.stride_tricks.sliding_window_view
    before = np.median(windows(series.values, width)[:-smooth:stride], axis=1)
    after = np.median(windows(series.values[width:], smooth)[::stride], axis=1)
    change = after / np.maximum(before, MIN_RISE) - 1
    worst = int(np.argmax(np.abs(change)))
    if abs(change[worst]) <= run.limits["length_shift"]:
        return
    at = width + worst * stride
    is_longer = change[worst] > 0
    yield found(
        "warn",
        f"The length of answers {'grows' if is_longer else 'shrinks'} by {percent(abs(change[worst]))} within "
        f"{number(run.limits['length_steps'])} steps, to {number(after[worst])} tokens at step {series.steps[at]}.",
        metric=run.name("mean_length"),
        steps=steps_of(series, at, at + smooth),
        value=float(change[worst]),
        threshold=run.limits["length_shift"],
        evidence=(f"median of the {width} points before: {number(before[worst])}",),
        cause="The policy no longer stops where it should: long answers are cut off and lose their reward."
        if is_longer
        else "Answers end early: degeneration, or an end-of-text token that is rewarded too much.",
        remedy=remedies.shorter_completions(run) if is_longer else remedies.watch(run),
    )


def _kl(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("kl")
    low, high, fault = (run.limits[name] for name in ("kl_low", "kl_high", "kl_fault"))
    peak = int(np.argmax(series.values))
    top = float(series.values[peak])
    median = float(np.median(series.values))
    if top > fault:
        where = series.steps[series.values > fault]
        bursts = [a for a in run.anomalies if any(m.metric == run.name("kl") for m in a.movers)]
        recurs = story(run.anomalies)
        yield found(
            "fail",
            f"The policy left its reference {counted(max(1, len(bursts)), 'time')}: KL up to {number(top)} at step "
            f"{series.steps[peak]}; {number(low)} to {number(high)} is healthy.",
            metric=run.name("kl"),
            steps=(int(where[0]), int(where[-1])),
            value=top,
            threshold=fault,
            evidence=(
                *([recurs] if recurs else []),
                *[f"{span(a.steps)} ({a.percent:.1f} %): {moved_along(a)}" for a in bursts[:10]],
                f"median {number(median)}; {remedies.fact(run, 'beta')}",
            ),
            cause="The policy has moved far from its reference; its texts change: lengths, format, gradient and loss "
            f"follow. {why_recovered(run)} {how_common(run)}",
            remedy=f"{remedies.stronger_kl(run)} {remedies.tighter_ratio(run)} {remedies.watch(run)}",
        )
    elif not low <= median <= high or top > high:
        yield found(
            "note",
            f"KL is {number(median)} in the median, at most {number(top)}; {number(low)} to {number(high)} is healthy.",
            metric=run.name("kl"),
            value=top if top > high else median,
            threshold=high if top > high else low,
            cause="A policy that hardly moves, or one about to leave its reference.",
            remedy=remedies.stronger_kl(run) if top > high else "None needed where the reward rises.",
        )


def _clipped_ratio(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("clipped_ratio")
    limit = run.limits["clipped_ratio"]
    where = series.steps[series.values > limit]
    if len(where):
        peak = int(np.argmax(series.values))
        yield found(
            "fail",
            f"Up to {percent(series.values[peak])} of the answers were cut off at the length limit (step "
            f"{series.steps[peak]}), above {percent(limit)} at {counted(len(where), 'point')}.",
            metric=run.name("clipped_ratio"),
            steps=(int(where[0]), int(where[-1])),
            value=float(series.values[peak]),
            threshold=limit,
            evidence=(f"steps {listed(str(step) for step in where.tolist())}", remedies.fact(run, "completion")),
            cause="The distribution of lengths has moved: answers run on to the limit, their format breaks and their "
            "reward is 0.",
            remedy=remedies.shorter_completions(run),
        )
    yield from _at_the_cap(run)


def _at_the_cap(run: AnalysedRun) -> Iterator[Finding]:
    cap, lengths = remedies.value(run, "completion"), run.find("max_length")
    if lengths is None or not isinstance(cap, int | float):
        return
    share = float((lengths.values >= CAP_SHARE * cap).mean())
    if share > run.limits["cap_share"]:
        yield found(
            "warn",
            f"The longest answer reaches the limit of {number(float(cap))} tokens at {percent(share)} of the points.",
            metric=run.name("max_length"),
            value=share,
            threshold=run.limits["cap_share"],
            evidence=(remedies.fact(run, "completion"),),
            cause="Some answers never stop by themselves.",
            remedy=remedies.shorter_completions(run),
            suffix="cap",
        )


def _clip_ratio(run: AnalysedRun) -> Iterator[Finding]:
    mean = float(run.get("clip_ratio").values.mean())
    low, high = run.limits["clip_ratio_low"], run.limits["clip_ratio_high"]
    if not low <= mean <= high:
        yield found(
            "note",
            f"{percent(mean)} of the probability ratios are clipped; {percent(low)} to {percent(high)} is usual.",
            metric=run.name("clip_ratio"),
            value=mean,
            threshold=low if mean < low else high,
            cause="Each batch is used once, so that ratios stay at 1." if mean < low else "Updates are too large.",
            remedy="None needed." if mean < low else f"{remedies.tighter_ratio(run)} {remedies.lower_rate(run)}",
        )


def _reward_drop(run: AnalysedRun) -> Iterator[Finding]:
    drops = [(a, m) for a in run.anomalies for m in a.movers if _has_halved(run, m)]
    if not drops:
        return
    intervals = list(dict.fromkeys(a.steps for a, _ in drops))
    metrics = list(dict.fromkeys(m.metric for _, m in drops))
    deepest_anomaly, deepest = min(drops, key=lambda pair: pair[1].z)
    yield found(
        "warn",
        f"Rewards fell by more than half in {counted(len(intervals), 'interval')}: {listed(metrics)}.",
        metric=deepest.metric,
        steps=(intervals[0][0], intervals[-1][1]),
        value=deepest.peak_value,
        threshold=run.limits["reward_drop"],
        evidence=tuple(_drop_lines(drops))[:10],
        cause="The answers of these batches broke the expected format or were cut off, so that most rewards are 0: an "
        "unstable signal that steers the next update." + _lead(deepest_anomaly),
        remedy=f"{remedies.larger_batch(run)} {remedies.watch(run)}",
    )


def _drop_lines(drops: list[tuple[Anomaly, Mover]]) -> Iterator[str]:
    """One line an interval: which rewards fell, and that the other movers moved with them."""
    for steps in dict.fromkeys(a.steps for a, _ in drops):
        fell = [f"{m.metric} down to {number(m.peak_value)}" for a, m in drops if a.steps == steps]
        anomaly = next(a for a, _ in drops if a.steps == steps)
        yield f"{span(steps)}: {listed(fell)}, in phase with {listed(m.metric for m in anomaly.movers if m.sign > 0)}"


def _lead(anomaly: Anomaly) -> str:
    is_told = bool(anomaly.chain) and meaning(anomaly.chain[0]).group != "reward"
    return f" It began with {anomaly.chain[0]}." if is_told else ""


def _has_halved(run: AnalysedRun, mover: Mover) -> bool:
    if mover.sign > 0 or meaning(mover.metric).group != "reward":
        return False
    values = run.log.series[mover.metric].values
    usual = float(np.median(values[np.isfinite(values)]))
    return usual > 0 and mover.peak_value < (1 - run.limits["reward_drop"]) * usual


def _advantages(run: AnalysedRun) -> Iterator[Finding]:
    means, spreads = run.find("adv_mean"), run.find("adv_std")
    if means is None and spreads is None:
        raise NotJudged("the log has no advantages")
    if means is not None and abs(mean := float(np.median(means.values))) > run.limits["adv_mean"]:
        yield found(
            "warn",
            f"Advantages have a mean of {number(mean)}; normalised by group it is 0.",
            metric=run.name("adv_mean"),
            value=mean,
            threshold=run.limits["adv_mean"],
            cause="Groups are formed wrongly, or the normalisation is missing.",
            remedy="Check that a group holds the samples of one prompt.",
            suffix="mean",
        )
    if spreads is None:
        return
    spread = float(np.median(spreads.values))
    low, high, dead = (run.limits[f"adv_std_{name}"] for name in ("low", "high", "dead"))
    if not low <= spread <= high:
        is_dead = spread < dead
        yield found(
            "warn",
            f"Advantages have a spread of {number(spread)}; about 1 is expected.",
            metric=run.name("adv_std"),
            value=spread,
            threshold=dead if is_dead else (low if spread < low else high),
            cause="All rewards of a group are equal: nothing to learn from." if is_dead else "Wrong normalisation.",
            remedy=remedies.larger_group(run) if is_dead else "Check how advantages are normalised.",
            suffix="std",
        )


def _entropy(run: AnalysedRun) -> Iterator[Finding]:
    points = bins(run.get("entropy"))
    if len(points) < 8:
        raise NotJudged(f"{len(points)} points of entropy")
    first = float(points.values[:3].mean())
    start, stop = longest_run(points.values < run.limits["entropy_share"] * first)
    if stop == len(points) and stop > start and first > 0:
        last = float(points.values[-1])
        yield found(
            "warn",
            f"Entropy collapsed to {number(last)}, {percent(last / first)} of its start.",
            metric=run.name("entropy"),
            steps=steps_of(points, start, stop),
            value=last / first,
            threshold=run.limits["entropy_share"],
            cause="The reward pulls too hard, or the sampling temperature is too low: the policy stops exploring.",
            remedy=f"Raise the temperature or an entropy bonus. {remedies.lower_rate(run)}",
        )


def _reward_clip(run: AnalysedRun) -> Iterator[Finding]:
    mean = float(run.get("reward_clip").values.mean())
    if mean > run.limits["reward_clip"]:
        yield found(
            "note",
            f"{percent(mean)} of the rewards are clipped.",
            metric=run.name("reward_clip"),
            value=mean,
            threshold=run.limits["reward_clip"],
            cause="The range or threshold of the reward is too narrow.",
            remedy="Widen the reward's clipping range, or scale the reward down.",
        )


RULES = (
    Rule("V30", "length_shift", _length_shift, ("mean_length",)),
    Rule("V31", "kl", _kl, ("kl",)),
    Rule("V32", "clipped_ratio", _clipped_ratio, ("clipped_ratio",)),
    Rule("V33", "clip_ratio", _clip_ratio, ("clip_ratio",)),
    Rule("V34", "reward_drop", _reward_drop, ("reward",), ("grpo",)),
    Rule("V37", "adv_shape", _advantages),
    Rule("V38", "entropy_collapse", _entropy, ("entropy",)),
    Rule("V41", "reward_clip", _reward_clip, ("reward_clip",)),
)
