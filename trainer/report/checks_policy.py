"""Checks of a policy: lengths, distance, entropy, rewards, accuracy, latency and budget."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trainer.report.advice import (
    clip,
    how_common,
    larger_batch,
    larger_group,
    lower_rate,
    shorter_completions,
    stronger_kl,
    tighter_ratio,
    watch,
    why_recovered,
)
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.checks import Told, fail, finding, info, note, warn
from trainer.report.formatting import counted, interval, listed, number, share
from trainer.report.result import Anomaly, Mover
from trainer.report.run_log import Series
from trainer.report.shapes import Move, began, beyond, bursts, in_a_row, shift, trend
from trainer.report.statistics import bins, finite, onset, rolling_median, slope
from trainer.report.vocabulary import meaning
from trainer.report.words import moved_along, story

CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_HITS = 3
"""Answers that reach the cap by chance are fewer."""
MIN_RISE = 1e-9
NUM_SMOOTH = 3
"""Points whose median stands for the present length of a generating policy."""
BANDS = {"reward": (-0.5, 0.0, 0.3), "accuracy": (0.0, 0.1, 0.2)}
"""What epochs 1-10, 11-20 and 21-30 of a controller reach: rewards about that, accuracies at
least.
"""
MIN_EPOCHS = 8
_FORMAT = re.compile(r"format|tag", re.IGNORECASE)


@finding("length_shift", "V30", "mean_length")
def length_shift(run: AnalysedRun, lengths: Series) -> Iterator[Told]:
    """The present median against that of the 50 steps before; and the shortest answers."""
    yield from _shortest(run)
    width = int(np.searchsorted(lengths.steps, lengths.steps[0] + run.limits["length_steps"]))
    smooth = NUM_SMOOTH if run.profile == "grpo" else width
    if width < NUM_SMOOTH or len(lengths) < 2 * width + smooth:
        raise NotJudged("too few points of length")
    stride = max(1, len(lengths) // 20_000)
    before = rolling_median(lengths.values[:-smooth], width, stride)
    after = rolling_median(lengths.values[width:], smooth, stride)
    change = after / np.maximum(before, MIN_RISE) - 1
    worst = int(np.argmax(np.abs(change)))
    size, limit = float(change[worst]), run.limits["length_shift"]
    if abs(size) <= limit:
        return
    at = width + worst * stride
    if size > 0:
        verb, remedy = "grows", shorter_completions(run)
        cause = "The policy no longer stops where it should: long answers are cut off and lose their reward."
    else:
        verb, remedy = "shrinks", watch(run)
        cause = (
            "Answers end early: degeneration, or an end-of-text token that is rewarded too much."
        )
    yield warn(
        f"The length of answers {verb} by {share(abs(size))} within "
        f"{number(run.limits['length_steps'])} steps, to {number(after[worst])} tokens at step "
        f"{lengths.steps[at]}.",
        steps=lengths[at : at + smooth].ends,
        value=size,
        limit=limit,
        evidence=[f"median of the {width} points before: {number(before[worst])}"],
        cause=cause,
        remedy=[remedy],
    )


def _shortest(run: AnalysedRun) -> Iterator[Told]:
    shortest = run.find("min_length")
    if shortest is None:
        return
    usual, highest = float(np.median(shortest.values)), float(shortest.values.max())
    times, limit = highest / max(usual, 1.0), run.limits["shortest_jump"]
    if times > limit:
        at = int(shortest.steps[np.argmax(shortest.values)])
        yield note(
            f"Even the shortest answer of a batch once had {number(highest)} tokens, at step {at}, "
            f"{number(times)} times the usual {number(usual)}.",
            id="shortest",
            metric=run.name("min_length"),
            steps=(at, at),
            value=times,
            limit=limit,
            cause="No answer stopped where it should: what ends a text was disturbed.",
            remedy=[watch(run)],
        )


@finding("kl", "V31", "kl")
def left_reference(run: AnalysedRun, kl: Series) -> Iterator[Told]:
    """Far from the reference, since it began to move by factors, with the intervals in which
    the policy left it.
    """
    limits, highest = run.limits, float(kl.values.max())
    healthy = f"{number(limits['kl_low'])} to {number(limits['kl_high'])} is healthy"
    median = number(float(np.median(kl.values)))
    above = bursts(kl, high=limits["kl_fault"])
    if len(above):
        met = [a for a in run.anomalies if any(m.metric == run.name("kl") for m in a.movers)]
        at = above.steps[np.argmax(above.values)]
        yield fail(
            f"The policy left its reference {counted(max(1, len(met)), 'time')}: KL up to "
            f"{number(highest)} at step {at}; {healthy}.",
            steps=(_began(kl, int(above.steps[0])), above.ends[1]),
            value=highest,
            limit=limits["kl_fault"],
            evidence=[
                story(run.anomalies),
                *(f"{interval(a.steps)} ({a.percent:.1f} %): {moved_along(a)}" for a in met[:10]),
                f"median {median}; {run.facts['beta']}",
            ],
            cause="The policy has moved far from its reference; its texts change: lengths, format, "
            f"gradient and loss follow. {why_recovered(run)} {how_common(run)}",
            remedy=[stronger_kl(run), tighter_ratio(run), watch(run)],
        )
    elif high := beyond(kl, high=limits["kl_high"], width=1):
        yield note(
            f"KL is {median} in the median, at most {number(highest)}; {healthy}.",
            steps=high.steps,
            value=highest,
            limit=limits["kl_high"],
            cause="A policy that is about to leave its reference.",
            remedy=[stronger_kl(run)],
        )
    elif np.median(kl.values) < limits["kl_low"]:
        yield note(
            f"KL is {median} in the median, at most {number(highest)}; {healthy}.",
            value=float(np.median(kl.values)),
            limit=limits["kl_low"],
            cause="A policy that hardly moves.",
            remedy="None needed where the reward rises.",
        )


def _began(kl: Series, first: int) -> int:
    """The step at which a KL that is far off at `first` began to move by factors."""
    values = kl.values[: int(np.searchsorted(kl.steps, first)) + 1]
    return int(kl.steps[onset(np.log(values) if values.min() > 0 else values, 0, len(values))])


@finding("clipped_ratio", "V32", profile=["grpo"])
def cut_answers(run: AnalysedRun) -> Iterator[Told]:
    """Answers cut off at the length limit, and the longest that reach it."""
    ratios, lengths = run.find("clipped_ratio"), run.find("max_length")
    if ratios is None and lengths is None:
        raise NotJudged("the log has neither lengths nor shares of answers that were cut off")
    limit = run.limits["clipped_ratio"]
    if ratios is not None and len(cut := bursts(ratios, high=limit)):
        yield fail(
            f"Up to {share(cut.values.max())} of the answers were cut off at the length limit "
            f"(step {cut.steps[np.argmax(cut.values)]}), above {share(limit)} at "
            f"{counted(len(cut), 'point')}.",
            metric=run.name("clipped_ratio"),
            steps=cut.ends,
            value=cut.values.max(),
            limit=limit,
            evidence=[_steps(cut), run.facts["completion"]],
            cause="The distribution of lengths has moved: answers run on to the limit, their "
            "format breaks and their reward is 0.",
            remedy=[shorter_completions(run)],
        )
    if lengths is not None:
        yield from _at_the_cap(run, lengths)


def _at_the_cap(run: AnalysedRun, lengths: Series) -> Iterator[Told]:
    """The longest answers that reach the limit; one that is not told is a length met often."""
    cap = run.setting("completion")
    if not isinstance(cap, int | float):
        top = lengths.values.max()
        cap = top if np.count_nonzero(lengths.values == top) >= MIN_HITS else np.inf
    hits = lengths[lengths.values >= CAP_SHARE * cap]
    if len(hits) < MIN_HITS:
        return
    part, limit = len(hits) / len(lengths), run.limits["cap_share"]
    reached = f"The longest answer reaches the limit of {number(float(cap))} tokens"
    is_often = part > limit
    often = (
        f"at {share(part)} of the points"
        if is_often
        else f"{len(hits)} times, first at step {hits.steps[0]}"
    )
    yield (warn if is_often else note)(
        f"{reached} {often}.",
        id="cap",
        metric=run.name("max_length"),
        steps=hits.ends,
        value=part,
        limit=limit,
        evidence=[_steps(hits), run.facts["completion"]],
        cause="Some answers never stop by themselves.",
        remedy=[shorter_completions(run)],
    )


def _steps(points: Series) -> str:
    return f"steps {listed(map(str, points.steps.tolist()))}"


@finding("clip_ratio", "V33", "clip_ratio")
def clipped_ratios(run: AnalysedRun, ratios: Series) -> Iterator[Told]:
    low, high = run.limits["clip_ratio_low"], run.limits["clip_ratio_high"]
    usual = f"{share(low)} to {share(high)} is usual"
    if much := beyond(ratios, high=high):
        yield note(
            f"{share(much.level)} of the probability ratios are clipped from step {much.steps[0]} "
            f"on; {usual}.",
            steps=much.steps,
            value=much.level,
            limit=high,
            cause="Updates are too large.",
            remedy=[tighter_ratio(run), lower_rate(run)],
        )
    elif (mean := float(ratios.values.mean())) < low:
        yield note(
            f"{share(mean)} of the probability ratios are clipped; {usual}.",
            value=mean,
            limit=low,
            cause="Each batch is used once, so that ratios stay at 1.",
            remedy="None needed.",
        )


@finding("reward_drop", "V34", "reward", profile=["grpo"])
def reward_drops(run: AnalysedRun, _: Series) -> Iterator[Told]:
    """Rewards that more than halved in an interval of instability, with what moved in phase."""
    fallen = {a: [m for m in a.movers if _has_halved(run, m)] for a in run.anomalies}
    drops = {anomaly: movers for anomaly, movers in fallen.items() if movers}
    if not drops:
        return
    anomaly, deepest = min(
        ((a, m) for a, movers in drops.items() for m in movers), key=lambda pair: pair[1].z
    )
    is_led = bool(anomaly.chain) and meaning(anomaly.chain[0]).group != "reward"
    lead = f" It began with {anomaly.chain[0]}." if is_led else ""
    metrics = listed(dict.fromkeys(mover.metric for movers in drops.values() for mover in movers))
    intervals = [a.steps for a in drops]
    yield warn(
        f"Rewards fell by more than half in {counted(len(drops), 'interval')}: {metrics}.",
        metric=deepest.metric,
        steps=(intervals[0][0], intervals[-1][1]),
        value=deepest.peak_value,
        limit=run.limits["reward_drop"],
        evidence=[_drop_line(*drop) for drop in drops.items()][:10],
        cause="The answers of these batches broke the expected format or were cut off, so that "
        f"most rewards are 0: an unstable signal that steers the next update.{lead}",
        remedy=[larger_batch(run), watch(run)],
    )


def _drop_line(anomaly: Anomaly, fallen: list[Mover]) -> str:
    fell = listed(f"{mover.metric} down to {number(mover.peak_value)}" for mover in fallen)
    rose = listed(mover.metric for mover in anomaly.movers if mover.sign > 0)
    return f"{interval(anomaly.steps)}: {fell}, in phase with {rose}"


def _has_halved(run: AnalysedRun, mover: Mover) -> bool:
    if mover.sign > 0 or meaning(mover.metric).group != "reward":
        return False
    values = run.log.series[mover.metric].values
    usual = float(np.median(values[np.isfinite(values)]))
    return usual > 0 and mover.peak_value < (1 - run.limits["reward_drop"]) * usual


@finding("reward_trend", "V35", "reward", profile=["grpo", "controller"])
def rewards(run: AnalysedRun, _: Series) -> Iterator[Told]:
    """Whether rewards scatter, fall, collapse, never rise, or never became positive."""
    yield from _scattering(run)
    collapsed = shift(run, "reward", sign=-1)
    means, enough = run.epochs("reward"), len(run.epochs("reward")) >= MIN_EPOCHS
    cause = "Training diverges, or the policy has found a dead end."
    falling = trend(run, "reward", good=1) if enough else None
    if falling:
        yield warn(
            f"The reward has been falling for more than {number(run.limits['rising_epochs'])} "
            f"epochs, by {number(abs(falling.change))}.",
            id="falling",
            steps=falling.steps,
            value=falling.change,
            limit=run.limits["rising_epochs"],
            cause=cause,
            remedy=[f"Stop or go back to {run.checkpoint(falling.best)}.", lower_rate(run)],
        )
    elif collapsed:
        yield collapse(run, collapsed)
    if not enough:
        raise NotJudged(f"{len(means)} epochs of reward, {MIN_EPOCHS} are needed")
    course = slope(means)
    is_rising = course.is_rising(run.limits["trend_p"])
    if not (is_rising or falling or collapsed):
        yield warn(
            f"The reward does not rise over the run (level {number(course.level)}, p = "
            f"{number(course.p_value)}).",
            id="flat",
            steps=means.ends,
            value=course.p_value,
            limit=run.limits["trend_p"],
            cause="The weights of the reward's parts drown what can be learnt, or groups are too "
            "small.",
            remedy=["Change the reward weights.", larger_group(run)],
        )
    if (highest := float(means.values.max())) < 0:
        yield (info if is_rising else warn)(
            "The reward is negative throughout, but it rises: that is fine."
            if is_rising
            else "The reward is negative throughout and does not rise.",
            id="negative",
            value=highest,
            limit=0,
            cause="Accuracy is still low, or the latency budget is missed.",
            remedy="Wait." if is_rising else "Check the accuracy and the budget first.",
        )


def _scattering(run: AnalysedRun) -> Iterator[Told]:
    ratio = run.limits["reward_scatter"]
    if run.find("reward_std") is not None and (
        move := shift(run, "reward_std", sign=1, ratio=ratio)
    ):
        yield warn(
            f"{move.metric} rose from {number(move.before)} to {number(move.after)} after step "
            f"{move.at}: "
            "rewards scatter.",
            id="scatter",
            metric=move.metric,
            steps=move.steps,
            value=move.times,
            limit=ratio,
            cause="Sampling has become unstable, or a reward function gives extreme values.",
            remedy=[
                f"Read answers from after step {move.at} with their rewards.",
                larger_group(run),
            ],
        )


def collapse(run: AnalysedRun, move: Move) -> Told:
    """What a result had reached and lost to the end."""
    return warn(
        f"{move.metric} fell from {number(move.before)} to {number(move.after)} after step "
        f"{move.at}.",
        id=f"collapse:{move.metric}",
        metric=move.metric,
        steps=move.steps,
        value=move.size,
        limit=move.least,
        cause="Training diverges, or the policy has found a dead end.",
        remedy=[f"Stop, go back to {run.checkpoint(move.at)}.", lower_rate(run)],
    )


@finding("reward_hacking", "V36")
def format_hacking(run: AnalysedRun) -> Iterator[Told]:
    forms = [key for key in run.log.series if _FORMAT.search(key) and "reward" in key.lower()]
    right = run.find("correct") or run.find("accuracy")
    if not forms or right is None:
        raise NotJudged("the log has no format reward beside one for being right")
    p, truth, limit = run.limits["trend_p"], slope(right), run.limits["reward_flat"]
    for key in forms:
        values = finite(run.log.series[key])
        form = slope(values)
        if not truth.is_rising(p) and form.is_rising(p) and form.relative_change > limit:
            yield warn(
                f"{key} rises by {number(form.change)} while the share of right answers stays flat.",
                id=key,
                metric=key,
                steps=(began(values), values.ends[1]),
                value=form.change,
                limit=limit,
                cause="The policy learns the form of an answer, not its content: format hacking.",
                remedy="Lower the weight of the format reward, or give it only to right answers.",
            )


@finding("adv_shape", "V37")
def advantages(run: AnalysedRun) -> Iterator[Told]:
    """Their mean and spread, and groups whose rewards are all equal."""
    means, spreads, equal = (run.find(role) for role in ("adv_mean", "adv_std", "equal_groups"))
    if means is None and spreads is None and equal is None:
        raise NotJudged(
            "the log has no train/adv_mean and no train/adv_std and no frac_reward_zero_std"
        )
    limits = run.limits
    if means is not None and (
        off := beyond(means, low=-limits["adv_mean"], high=limits["adv_mean"])
    ):
        yield warn(
            f"Advantages have a mean of {number(off.level)} from step {off.steps[0]} on; "
            f"normalised by group it is 0.",
            id="mean",
            metric=run.name("adv_mean"),
            steps=off.steps,
            value=off.level,
            limit=limits["adv_mean"] if off.is_high else -limits["adv_mean"],
            cause="Groups are formed wrongly, or the normalisation is missing.",
            remedy="Check that a group holds the samples of one prompt.",
        )
    if spreads is not None:
        yield from _spread_of_advantages(run, spreads)
    if equal is not None and (stuck := beyond(equal, high=limits["equal_groups"])):
        yield warn(
            f"In {share(stuck.level)} of the groups all rewards are equal, from step "
            f"{stuck.steps[0]} on.",
            id="std",
            metric=run.name("equal_groups"),
            steps=stuck.steps,
            value=stuck.level,
            limit=limits["equal_groups"],
            cause="All rewards of a group are equal: nothing to learn from.",
            remedy=[larger_group(run)],
        )


def _spread_of_advantages(run: AnalysedRun, spreads: Series) -> Iterator[Told]:
    limits = run.limits
    dead = beyond(spreads, low=limits["adv_std_dead"])
    odd = dead or beyond(spreads, low=limits["adv_std_low"], high=limits["adv_std_high"])
    if not odd:
        return
    limit = "adv_std_dead" if dead else "adv_std_high" if odd.is_high else "adv_std_low"
    yield warn(
        f"Advantages have a spread of {number(odd.level)} from step {odd.steps[0]} on; about 1 is "
        f"expected.",
        id="std",
        metric=run.name("adv_std"),
        steps=odd.steps,
        value=odd.level,
        limit=limits[limit],
        cause="All rewards of a group are equal: nothing to learn from."
        if dead
        else "Wrong normalisation.",
        remedy=[larger_group(run)] if dead else "Check how advantages are normalised.",
    )


@finding("entropy_collapse", "V38", "entropy")
def entropy(run: AnalysedRun, _: Series) -> Iterator[Told]:
    ratio = run.limits["entropy_share"]
    if move := shift(run, "entropy", sign=-1, ratio=ratio):
        yield warn(
            f"Entropy collapsed from step {move.onset} on, to {number(move.after)}, "
            f"{share(move.times)} of its start.",
            steps=move.steps,
            value=move.times,
            limit=ratio,
            cause="The reward pulls too hard, or the sampling temperature is too low: the policy "
            "stops exploring.",
            remedy=["Raise the temperature or an entropy bonus.", lower_rate(run)],
        )


@finding("accuracy", "V39", "accuracy", profile=["controller"])
def accuracy(run: AnalysedRun, _: Series) -> Iterator[Told]:
    limits, right = run.limits, run.epochs("accuracy")
    zero, collapsed = in_a_row(right, right.values == 0), shift(run, "accuracy", sign=-1)
    if len(zero) >= limits["accuracy_zero_epochs"]:
        yield warn(
            f"The accuracy is 0 for {len(zero)} epochs.",
            id="zero",
            steps=zero.ends,
            value=len(zero),
            limit=limits["accuracy_zero_epochs"],
            cause="Often the answers are missing from the metadata; else the metric does not match "
            "the texts.",
            remedy="Check the answers field, read generated texts, check the metric; early in "
            "training wait.",
        )
    elif collapsed:
        yield collapse(run, collapsed)
    elif len(right) >= limits["min_epochs"] and not slope(right).is_rising(limits["trend_p"]):
        first, last = number(float(right.values[0])), number(float(right.values[-1]))
        yield warn(
            f"The accuracy does not improve (from {first} to {last}).",
            id="flat",
            steps=right.ends,
            value=right.values[-1],
            cause="Too little training yet, or unsuitable hyper-parameters.",
            remedy=f"Train longer, or change {run.options['lr']} and {run.options['group']}.",
        )
    if below := tuple(_below_the_bands(run)):
        yield note(
            f"Below the usual course: {below[0]}.",
            id="bands",
            evidence=below,
            remedy="The trend counts more than the level.",
        )


def _below_the_bands(run: AnalysedRun) -> Iterator[str]:
    """What is lower than usual in epochs 1 to 30: worth a note, not more."""
    for role, levels in BANDS.items():
        if run.find(role) is None:
            continue
        means = run.epochs(role)
        epochs = 1 + np.arange(len(means)) if run.has_batches else means.steps
        for (first, last), level in zip(pairwise((0, 10, 20, 30)), levels, strict=True):
            part = means.values[(epochs > first) & (epochs <= last)]
            if len(part) >= 5 and (mean := float(np.mean(part))) < level - 0.25 * (
                role == "reward"
            ):
                yield f"{run.name(role)} {number(mean)} in epochs {first + 1} to {last}"


@finding("budget", "V40", profile=["controller"])
def budget(run: AnalysedRun) -> Iterator[Told]:
    """Answers that miss the latency budget, and the latency at the end."""
    violations, latency = run.find("violation"), run.find("latency")
    if violations is None and latency is None:
        raise NotJudged("the log has neither latency nor budget violations")
    if violations is not None:
        yield from _violations(run, run.epochs("violation"))
    given = run.limits["latency_budget"] or run.config(
        "latency_budget", "budget_ms", "latency_budget_ms", "budget"
    )
    if latency is not None and isinstance(given, int | float):
        level = float(bins(latency).values[-10:].mean())
        if level > given:
            yield warn(
                f"The latency ends at {number(level)} ms, above the budget of "
                f"{number(float(given))} ms.",
                id="latency",
                metric=run.name("latency"),
                value=level,
                limit=given,
                cause="The controller still chooses expensive configurations.",
                remedy="Raise the weight of the latency penalty.",
            )


def _violations(run: AnalysedRun, violations: Series) -> Iterator[Told]:
    limits, metric = run.limits, run.name("violation")
    stuck = in_a_row(violations, violations.values > limits["violation"])
    if len(stuck) >= limits["violation_epochs"]:
        yield warn(
            f"More than {share(limits['violation'])} of the answers miss the budget for "
            f"{len(stuck)} epochs.",
            id="stuck",
            metric=metric,
            steps=stuck.ends,
            value=stuck.values.mean(),
            limit=limits["violation"],
            cause="The penalty for missing the budget is too weak, or the budget cannot be met.",
            remedy="Raise the violation penalty, or the budget.",
        )
        return
    last, aim = float(violations.values[-5:].mean()), limits["violation_final_note"]
    if len(violations) < limits["min_epochs"] or last < aim:
        return
    is_high, is_falling = (
        last >= limits["violation_final_warn"],
        slope(violations).is_falling(limits["trend_p"]),
    )
    yield (warn if is_high and not is_falling else note)(
        f"{share(last)} of the answers still miss the budget at the end; below {share(aim)} is the "
        f"aim{'; it is falling' if is_falling else ''}.",
        id="final",
        metric=metric,
        value=last,
        limit=limits["violation_final_warn"] if is_high else aim,
        cause="Training is not finished, or the penalty is weak.",
        remedy="Train on while it falls; else raise the violation penalty.",
    )


@finding("value_network", "V47")
def value_network(run: AnalysedRun) -> Iterator[Told]:
    """The loss and the error of the network that foretells rewards."""
    present = [role for role in ("value_loss", "value_error") if run.find(role) is not None]
    if not present:
        raise NotJudged("the log has no critic/loss and no critic/error")
    for role in present:
        if move := shift(run, role, sign=1, ratio=run.limits["value_rise"]):
            yield warn(
                f"{move.metric} rose from {number(move.before)} to {number(move.after)} after step "
                f"{move.at}.",
                id=move.metric,
                metric=move.metric,
                steps=move.steps,
                value=move.times,
                limit=run.limits["value_rise"],
                cause="The value network no longer foretells the rewards: advantages are noise.",
                remedy=[
                    f"Lower its learning rate, or go back to {run.checkpoint(move.at)}.",
                    clip(run),
                ],
            )


@finding("reward_clip", "V41", "reward_clip")
def clipped_rewards(run: AnalysedRun, shares: Series) -> Iterator[Told]:
    if many := beyond(shares, high=run.limits["reward_clip"]):
        yield note(
            f"{share(many.level)} of the rewards are clipped from step {many.steps[0]} on.",
            steps=many.steps,
            value=many.level,
            limit=run.limits["reward_clip"],
            cause="The range or threshold of the reward is too narrow.",
            remedy="Widen the reward's clipping range, or scale the reward down.",
        )
