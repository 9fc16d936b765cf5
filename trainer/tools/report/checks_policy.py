"""Checks of a policy: lengths, distance, rewards, accuracy, latency and budget."""

import re

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.anomalies import is_of
from trainer.tools.report.checks import (
    MAX_EVIDENCE,
    Findings,
    fail,
    finding,
    info,
    note,
    warn,
)
from trainer.tools.report.formatting import counted, interval, listed, number, share
from trainer.tools.report.result import Mover
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import began, onset, shift
from trainer.tools.report.statistics import finite, slope
from trainer.tools.report.vocabulary import meaning
from trainer.tools.report.words import how_common, moved_along, story, why_recovered

CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_HITS = 3
"""Fewer answers reach the cap by chance."""
CAP_OFTEN = 0.2
"""Share of points at the cap from here on a fault."""
KL_FAR = 10
MIN_EPOCHS, MIN_VERDICT_EPOCHS = 8, 20
"""Epochs that a trend of rewards needs; epochs before a controller is called bad."""
USUAL = {
    "reward": (1, (-0.75, -0.25, 0.05)),
    "accuracy": (1, (0.0, 0.1, 0.2)),
    "violation": (-1, (0.6, 0.4, 0.3)),
}
"""Result of a controller -> its good direction, and what its mean reaches in epochs 1-10, 11-20 and
21-30.
"""
MIN_PART = 5
"""Epochs of ten that are judged."""
_FORMAT = re.compile(r"(format|tag).*reward|reward.*(format|tag)", re.IGNORECASE)


@finding("kl", "kl")
def left_reference(run: AnalysedRun, kl: Series) -> Findings:
    """Find a KL far from the reference, from the step on at which it began to move by factors."""
    far = kl[kl.values > KL_FAR]
    if not far:
        return
    met = [anomaly for anomaly in run.anomalies if is_of(anomaly, "kl")]
    # a few points after the first tell a step from a ramp
    values = kl.values[: int(np.searchsorted(kl.steps, far.steps[0])) + 5]
    start = onset(np.log(values) if values.min() > 0 else values, 0, len(values))
    peak = np.argmax(far.values)
    yield fail(
        f"The policy left its reference {counted(max(1, len(met)), 'time')}: KL up to "
        f"{number(far.values[peak])} at step {far.steps[peak]}; 0.01 to 5 is healthy.",
        steps=(kl.steps[start], far.steps[-1]),
        evidence=[
            story(run.anomalies),
            *(f"{interval(a.steps)}: {moved_along(a)}" for a in met[:MAX_EVIDENCE]),
            f"median {number(np.median(kl.values))}; {run.quoted('beta')}",
        ],
        cause="The policy has moved far from its reference; its texts change: lengths, format, "
        f"gradient and loss follow. {why_recovered(run)} {how_common(run)}",
        remedy=("stronger_kl", "tighter_ratio", "watch"),
    )


@finding("clipped_ratio:cap", "max_length", profiles=("grpo",))
def at_the_cap(run: AnalysedRun, lengths: Series) -> Findings:
    """Find longest answers that reach the limit; without a known limit a length met often."""
    longest = lengths.values.max()
    is_often = np.count_nonzero(lengths.values == longest) >= MIN_HITS
    cap = run.amount("completion") or (longest if is_often else np.inf)
    hits = lengths[lengths.values >= CAP_SHARE * cap]
    part = len(hits) / len(lengths)
    if len(hits) >= MIN_HITS:
        yield (warn if part > CAP_OFTEN else note)(
            f"The longest answer reaches the limit of {number(cap)} tokens at {share(part)} "
            f"of the points, first at step {hits.steps[0]}.",
            steps=hits.ends,
            evidence=[f"steps {listed(map(str, hits.steps))}", run.quoted("completion")],
            cause="Some answers never stop by themselves.",
            remedy=("shorter_completions",),
        )


@finding("reward_drop", "reward", profiles=("grpo",))
def reward_drops(run: AnalysedRun, _: Series) -> Findings:
    """Find rewards that more than halved in an interval of instability, and what moved in phase."""
    fallen = {m: a for a in run.anomalies for m in a.movers if _has_halved(run, m)}
    if not fallen:
        return
    drops = list(dict.fromkeys(fallen.values()))
    yield warn(
        f"Rewards fell by more than half in {counted(len(drops), 'interval')}: "
        f"{listed(dict.fromkeys(mover.metric for mover in fallen))}.",
        metric=min(fallen, key=lambda mover: mover.z).metric,
        steps=(drops[0].steps[0], drops[-1].steps[1]),
        evidence=[
            f"{interval(one.steps)}, in phase: {moved_along(one)}" for one in drops[:MAX_EVIDENCE]
        ],
        cause="The answers of these batches broke the expected format or were cut off, so that "
        "most rewards are 0: an unstable signal that steers the next update.",
        remedy=("larger_batch", "watch"),
    )


def _has_halved(run: AnalysedRun, mover: Mover) -> bool:
    """Return whether a reward fell below half of its usual level."""
    if mover.sign > 0 or meaning(mover.metric).group != "reward":
        return False
    usual = float(np.nanmedian(run.log.series[mover.metric].values))
    return usual > 0 and mover.peak_value < 0.5 * usual


@finding("reward_trend", "reward", profiles=("grpo", "controller"), least=MIN_EPOCHS)
def rewards(run: AnalysedRun, _: Series) -> Findings:
    """Find rewards that never rise, or never became positive."""
    means = run.levels("reward")
    rises = _has_risen(run, means)
    if not rises and len(means) >= MIN_EPOCHS:
        yield warn(
            f"The reward does not rise; its level is {number(np.median(means.values))}.",
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


def _has_risen(run: AnalysedRun, means: Series) -> bool:
    """Return whether a result got better, over the run or up to a plateau."""
    return run.is_rising(means) or shift(means, sign=1) is not None


@finding("reward_hacking")
def format_hacking(run: AnalysedRun) -> Findings:
    """Find a format reward that rises while the share of right answers does not."""
    forms = [key for key in run.log.series if _FORMAT.search(key)]
    right = run.find("correct") or run.find("accuracy")
    if not forms or right is None:
        raise NotJudged("the log has no format reward beside one for being right")
    for key in forms:
        values = finite(run.log.series[key])
        form = slope(values)
        is_learnt = run.is_rising(values) and form.relative_change > 0.05
        if is_learnt and not run.is_rising(right):
            yield warn(
                f"{key} rises by {number(form.change)} while the share of right answers does not.",
                id=key,
                metric=key,
                steps=(began(values), values.steps[-1]),
                cause="The policy learns the form of an answer, not its content: format hacking.",
                remedy=(
                    "Lower the weight of the format reward, or give it only to right answers.",
                ),
            )


@finding("accuracy:flat", "accuracy", profiles=("controller",))
def flat_accuracy(run: AnalysedRun, _: Series) -> Findings:
    """Find an accuracy above 0 that never rises."""
    right = run.levels("accuracy")
    if len(right) >= MIN_VERDICT_EPOCHS and right.values.max() > 0 and not _has_risen(run, right):
        first, last = number(right.values[0]), number(right.values[-1])
        yield warn(
            f"The accuracy does not improve (from {first} to {last}).",
            steps=right.ends,
            cause="Too little training yet, or unsuitable hyper-parameters.",
            remedy=("Train longer, or change {lr} and {group}.",),
        )


@finding("accuracy:bands", "accuracy", profiles=("controller",))
def off_the_usual_course(run: AnalysedRun, _: Series) -> Findings:
    """Compare the results of each ten epochs with those of good runs."""
    off = []
    for role, (sign, levels) in USUAL.items():
        means = run.levels(role).values if run.find(role) else np.empty(0)
        for first, level in zip((0, 10, 20), levels, strict=True):
            part = means[first : first + 10]
            if len(part) >= MIN_PART and sign * (part.mean() - level) < 0:
                epochs = f"{first + 1} to {first + 10}"
                off.append(f"{run.name(role)} {number(part.mean())} in epochs {epochs}")
    if off:
        yield note(
            f"Off the usual course: {off[0]}.",
            evidence=off,
            remedy=("The trend counts more than the level.",),
        )


@finding("not_learning:bad", "reward", "accuracy", profiles=("controller",))
def learning_nothing(run: AnalysedRun, rewards: Series, right: Series) -> Findings:
    """Find a run whose reward stays below 0 and whose accuracy stays at 0."""
    is_long = len(run.levels("reward")) >= MIN_VERDICT_EPOCHS
    if is_long and rewards.values.max() < 0 and right.values.max() == 0:
        yield fail(
            "Bad run: the reward stays below 0 and the accuracy at 0 throughout.",
            cause="The controller learns nothing: answers missing from the metadata, or unsuitable "
            "reward weights.",
            remedy=(
                "Check the answers field, generated texts and the metric, then the weights of the "
                "reward.",
            ),
        )
