"""Checks of a policy: lengths, distance, rewards, accuracy, latency and budget."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trainer.report.advice import how_common, why_recovered
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.checks import fail, finding, info, note, warn
from trainer.report.formatting import counted, interval, listed, number, share
from trainer.report.result import Finding, Mover
from trainer.report.run_log import Series
from trainer.report.shapes import began, onset, shift
from trainer.report.statistics import finite, slope
from trainer.report.vocabulary import meaning
from trainer.report.words import moved_along, story

CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_HITS = 3
"""Answers that reach the cap by chance are fewer."""
CAP_OFTEN = 0.2
"""Share of points at the cap, from here on a fault."""
KL_FAR = 10
MIN_EPOCHS = 8
BANDS = {"reward": (-0.5, 0.0, 0.3), "accuracy": (0.0, 0.1, 0.2), "violation": (0.5, 0.3, 0.2)}
"""What a controller reaches in epochs 1-10, 11-20 and 21-30, about; violations are to be lower."""
SLACK = {"reward": 0.25, "accuracy": 0.0, "violation": 0.1}
_FORMAT = re.compile(r"format|tag", re.IGNORECASE)


@finding("kl", "kl")
def left_reference(run: AnalysedRun, kl: Series) -> Iterator[Finding]:
    """Find a KL far from the reference, from the step on at which it began to move by factors."""
    far = kl[kl.values > KL_FAR]
    if not len(far):
        return
    met = [a for a in run.anomalies if any(m.metric == run.name("kl") for m in a.movers)]
    # with a few points behind the first, or a step could not be told
    values = kl.values[: int(np.searchsorted(kl.steps, far.steps[0])) + 5]
    start = onset(np.log(values) if values.min() > 0 else values, 0, len(values))
    yield fail(
        f"The policy left its reference {counted(max(1, len(met)), 'time')}: KL up to "
        f"{number(float(far.values.max()))} at step {far.steps[np.argmax(far.values)]}; 0.01 to 5 "
        f"is healthy.",
        steps=(int(kl.steps[start]), far.ends[1]),
        evidence=[
            story(run.anomalies),
            *(f"{interval(a.steps)} ({a.percent:.1f} %): {moved_along(a)}" for a in met[:10]),
            f"median {number(float(np.median(kl.values)))}; {run.facts['beta']}",
        ],
        cause="The policy has moved far from its reference; its texts change: lengths, format, "
        f"gradient and loss follow. {why_recovered(run)} {how_common(run)}",
        remedy=("stronger_kl", "tighter_ratio", "watch"),
    )


@finding("length_shift", "min_length")
def long_shortest(run: AnalysedRun, shortest: Series) -> Iterator[Finding]:
    usual, highest = float(np.median(shortest.values)), float(shortest.values.max())
    if highest > 2 * max(usual, 1.0):
        at = int(shortest.steps[np.argmax(shortest.values)])
        yield note(
            f"Even the shortest answer of a batch once had {number(highest)} tokens, at step {at}; "
            f"{number(usual)} is usual.",
            id="shortest",
            steps=(at, at),
            cause="No answer stopped where it should: what ends a text was disturbed.",
            remedy=("watch",),
        )


@finding("clipped_ratio", "max_length", profile=["grpo"])
def at_the_cap(run: AnalysedRun, lengths: Series) -> Iterator[Finding]:
    """Find longest answers that reach the limit; one that is not told is a length met often."""
    cap = run.setting("completion")
    if not isinstance(cap, int | float):
        top = lengths.values.max()
        cap = top if np.count_nonzero(lengths.values == top) >= MIN_HITS else np.inf
    hits = lengths[lengths.values >= CAP_SHARE * cap]
    part = len(hits) / len(lengths)
    if len(hits) >= MIN_HITS:
        yield (warn if part > CAP_OFTEN else note)(
            f"The longest answer reaches the limit of {number(float(cap))} tokens at {share(part)} "
            f"of the points, first at step {hits.steps[0]}.",
            id="cap",
            steps=hits.ends,
            evidence=[f"steps {listed(map(str, hits.steps.tolist()))}", run.facts["completion"]],
            cause="Some answers never stop by themselves.",
            remedy=("shorter_completions",),
        )


@finding("reward_drop", "reward", profile=["grpo"])
def reward_drops(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    """Find rewards that more than halved in an interval of instability, and what moved in phase."""
    fallen = [(a, m) for a in run.anomalies for m in a.movers if _has_halved(run, m)]
    if not fallen:
        return
    drops = list(dict.fromkeys(anomaly for anomaly, _ in fallen))
    yield warn(
        f"Rewards fell by more than half in {counted(len(drops), 'interval')}: "
        f"{listed(dict.fromkeys(mover.metric for _, mover in fallen))}.",
        metric=min((mover for _, mover in fallen), key=lambda mover: mover.z).metric,
        steps=(drops[0].steps[0], drops[-1].steps[1]),
        evidence=[f"{interval(one.steps)}, in phase: {moved_along(one)}" for one in drops[:10]],
        cause="The answers of these batches broke the expected format or were cut off, so that "
        "most rewards are 0: an unstable signal that steers the next update.",
        remedy=("larger_batch", "watch"),
    )


def _has_halved(run: AnalysedRun, mover: Mover) -> bool:
    if mover.sign > 0 or meaning(mover.metric).group != "reward":
        return False
    usual = float(np.nanmedian(run.log.series[mover.metric].values))
    return usual > 0 and mover.peak_value < 0.5 * usual


@finding("reward_trend", "reward", profile=["grpo", "controller"])
def rewards(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    """Find rewards that never rise, or never became positive."""
    means, rises = run.epochs("reward"), _has_risen(run, "reward")
    if len(means) < MIN_EPOCHS:
        raise NotJudged(f"{len(means)} epochs of reward, {MIN_EPOCHS} are needed")
    if not rises:
        yield warn(
            f"The reward does not rise; its level is {number(float(np.median(means.values)))}.",
            id="flat",
            steps=means.ends,
            cause="The weights of the reward's parts drown what can be learnt, or groups are too "
            "small.",
            remedy=("Change the reward weights.", "larger_group"),
        )
    if means.values.max() < 0:
        yield (info if rises else warn)(
            f"The reward is negative throughout{', but it rises: that is fine' if rises else ''}.",
            id="negative",
            cause="Accuracy is still low, or the latency budget is missed.",
            remedy=("Wait while it rises; else check the accuracy and the budget.",),
        )


def _has_risen(run: AnalysedRun, role: str) -> bool:
    """Return whether a result got better, over the run or up to a plateau."""
    means = run.epochs(role)
    return slope(means).is_rising(run.limits["trend_p"]) or shift(means, sign=1) is not None


@finding("reward_hacking")
def format_hacking(run: AnalysedRun) -> Iterator[Finding]:
    forms = [key for key in run.log.series if _FORMAT.search(key) and "reward" in key.lower()]
    right = run.find("correct") or run.find("accuracy")
    if not forms or right is None:
        raise NotJudged("the log has no format reward beside one for being right")
    p, truth = run.limits["trend_p"], slope(right)
    for key in forms:
        values = finite(run.log.series[key])
        form = slope(values)
        if not truth.is_rising(p) and form.is_rising(p) and form.relative_change > 0.05:
            yield warn(
                f"{key} rises by {number(form.change)} while the share of right answers does not.",
                id=key,
                metric=key,
                steps=(began(values), values.ends[1]),
                cause="The policy learns the form of an answer, not its content: format hacking.",
                remedy=(
                    "Lower the weight of the format reward, or give it only to right answers.",
                ),
            )


@finding("accuracy", "accuracy", profile=["controller"])
def accuracy(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    right = run.epochs("accuracy")
    is_zero = right.values.max() == 0
    if len(right) >= run.limits["min_epochs"] and not is_zero and not _has_risen(run, "accuracy"):
        yield warn(
            f"The accuracy does not improve (from {number(right.values[0])} to "
            f"{number(right.values[-1])}).",
            id="flat",
            steps=right.ends,
            cause="Too little training yet, or unsuitable hyper-parameters.",
            remedy=("Train longer, or change {lr} and {group}.",),
        )
    if below := tuple(_below_the_bands(run)):
        yield note(
            f"Off the usual course: {below[0]}.",
            id="bands",
            evidence=below,
            remedy=("The trend counts more than the level.",),
        )


def _below_the_bands(run: AnalysedRun) -> Iterator[str]:
    for role, levels in BANDS.items():
        if run.find(role) is None:
            continue
        means = run.epochs(role).values
        sign = -1 if role == "violation" else 1
        for (first, last), level in zip(pairwise((0, 10, 20, 30)), levels, strict=True):
            part = means[first:last]
            if len(part) >= 5 and sign * (part.mean() - level) < -SLACK[role]:
                yield f"{run.name(role)} {number(part.mean())} in epochs {first + 1} to {last}"


@finding("budget", "latency", profile=["controller"])
def latency(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    names = ("latency_budget", "budget_ms", "latency_budget_ms", "budget")
    given = run.limits["latency_budget"] or run.config(*names)
    level = float(run.epochs("latency").values[-10:].mean())
    if isinstance(given, int | float) and level > given:
        yield warn(
            f"The latency ends at {number(level)} ms, above the budget of {number(float(given))} ms.",
            id="latency",
            cause="The controller still chooses expensive configurations.",
            remedy=("Raise the weight of the latency penalty.",),
        )
