"""V35, V36, V39 and V40: rewards, accuracy, latency and budget over the epochs."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.collapse import collapse
from trainer.report.judge import Rule, found
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.sentence_parts import number, percent
from trainer.report.statistics import bins, longest_run, noise, slope

BANDS = {
    "reward": (-0.5, 0.0, 0.3),
    "accuracy": (0.0, 0.1, 0.2),
}
"""What epochs 1-10, 11-20 and 21-30 of a controller reach (S1.28): rewards about that, accuracies at least."""
MIN_EPOCHS = 8
CLEAR_SIGMA = 3
"""A fall is at least so many times the noise from epoch to epoch: of many good runs some end lower by chance."""
_FORMAT = re.compile(r"format|tag", re.IGNORECASE)


def collapsed(run: AnalysedRun, role: str) -> Iterator[Finding]:
    """What a reward or accuracy had reached and lost."""
    fall = collapse(run.get(role), run.limits)
    if fall is not None:
        last_good = fall.steps[0]
        yield found(
            "warn",
            f"{run.name(role)} fell from {number(fall.before)} to {number(fall.after)} after step {last_good}.",
            metric=run.name(role),
            steps=fall.steps,
            value=fall.before - fall.after,
            threshold=fall.least,
            cause="Training diverges, or the policy has found a dead end.",
            remedy=f"Stop, go back to {remedies.checkpoint(run, last_good)}. {remedies.lower_rate(run)}",
            suffix=f"collapse:{run.name(role)}",
        )


def _rewards(run: AnalysedRun) -> Iterator[Finding]:
    means = run.epochs("reward")
    if len(means) < MIN_EPOCHS:
        raise NotJudged(f"{len(means)} epochs of reward, {MIN_EPOCHS} are needed")
    whole = slope(means)
    is_rising = whole.is_rising(run.limits["trend_p"])
    needed = int(run.limits["rising_epochs"]) + 1
    last = Series(means.steps[-needed:], means.values[-needed:])
    recent = slope(last)
    is_clear = abs(recent.change) > CLEAR_SIGMA * noise(means)
    if len(last) == needed and recent.is_falling(run.limits["rising_p"]) and is_clear:
        yield found(
            "warn",
            f"The reward has been falling for more than {needed - 1} epochs, by {number(abs(recent.change))}.",
            metric=run.name("reward"),
            steps=steps_of(last, 0, len(last)),
            value=recent.change,
            threshold=run.limits["rising_epochs"],
            cause="Training diverges, or the policy has found a dead end.",
            remedy=f"Stop or go back to {remedies.checkpoint(run, int(means.steps[int(np.argmax(means.values))]))}. "
            + remedies.lower_rate(run),
            suffix="falling",
        )
    elif has_collapsed := list(collapsed(run, "reward")):
        yield from has_collapsed
    elif not is_rising:
        yield found(
            "warn",
            f"The reward does not rise over the run (level {number(whole.level)}, p = {number(whole.p_value)}).",
            metric=run.name("reward"),
            steps=steps_of(means, 0, len(means)),
            value=whole.p_value,
            threshold=run.limits["trend_p"],
            cause="The weights of the reward's parts drown what can be learnt, or groups are too small.",
            remedy=f"Change the reward weights. {remedies.larger_group(run)}",
            suffix="flat",
        )
    if means.values.max() < 0:
        yield found(
            "info" if is_rising else "warn",
            "The reward is negative throughout"
            + (", but it rises: that is fine." if is_rising else " and does not rise."),
            metric=run.name("reward"),
            value=float(means.values.max()),
            threshold=0.0,
            cause="Accuracy is still low, or the latency budget is missed.",
            remedy="Wait." if is_rising else "Check the accuracy and the budget first.",
            suffix="negative",
        )


def _hacking(run: AnalysedRun) -> Iterator[Finding]:
    forms = [key for key in run.log.series if _FORMAT.search(key) and "reward" in key.lower()]
    right = run.find("correct") or run.find("accuracy")
    if not forms or right is None:
        raise NotJudged("the log has no format reward beside one for being right")
    p, truth = run.limits["trend_p"], slope(right)
    if truth.is_rising(p):
        return
    for key in forms:
        form = slope(run.log.series[key])
        if form.is_rising(p) and form.relative_change > run.limits["reward_flat"]:
            yield found(
                "warn",
                f"{key} rises by {number(form.change)} while the share of right answers stays flat.",
                metric=key,
                value=form.change,
                threshold=run.limits["reward_flat"],
                cause="The policy learns the form of an answer, not its content: format hacking.",
                remedy="Lower the weight of the format reward, or give it only to right answers.",
                suffix=key,
            )


def _accuracy(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("accuracy")
    start, stop = longest_run(series.values == 0)
    limit = run.limits["accuracy_zero_epochs"]
    if stop - start > limit:
        yield found(
            "warn",
            f"The accuracy is 0 for {stop - start} epochs.",
            metric=run.name("accuracy"),
            steps=steps_of(series, start, stop),
            value=float(stop - start),
            threshold=limit,
            cause="Often the answers are missing from the metadata; else the metric does not match the texts.",
            remedy="Check the answers field, read generated texts, check the metric; early in training wait.",
            suffix="zero",
        )
    elif has_collapsed := list(collapsed(run, "accuracy")):
        yield from has_collapsed
    elif len(series) >= run.limits["min_epochs"] and not slope(series).is_rising(run.limits["trend_p"]):
        yield found(
            "warn",
            f"The accuracy does not improve (from {number(series.values[0])} to {number(series.values[-1])}).",
            metric=run.name("accuracy"),
            steps=steps_of(series, 0, len(series)),
            value=float(series.values[-1]),
            cause="Too little training yet, or unsuitable hyper-parameters.",
            remedy=f"Train longer, or change {remedies.option(run, 'lr')} and {remedies.option(run, 'group')}.",
            suffix="flat",
        )
    yield from _bands(run)


def _bands(run: AnalysedRun) -> Iterator[Finding]:
    """The seed's reference for epochs 1 to 30: being below it is worth a note, not more."""
    below = []
    for role, levels in BANDS.items():
        series = run.find(role)
        if series is None:
            continue
        for (first, last), level in zip(pairwise((0, 10, 20, 30)), levels, strict=True):
            part = series.values[(series.steps > first) & (series.steps <= last)]
            if len(part) >= 5 and float(part.mean()) < level - 0.25 * (role == "reward"):
                below.append(f"{run.name(role)} {number(float(part.mean()))} in epochs {first + 1} to {last}")
    if below:
        yield found(
            "note",
            f"Below the usual course: {below[0]}.",
            evidence=tuple(below),
            remedy="The trend counts more than the level.",
            suffix="bands",
        )


def _budget(run: AnalysedRun) -> Iterator[Finding]:
    violations, latency = run.find("violation"), run.find("latency")
    if violations is None and latency is None:
        raise NotJudged("the log has neither latency nor budget violations")
    if violations is not None:
        yield from _violations(run, violations)
    budget = run.limits["latency_budget"] or run.config("latency_budget", "budget_ms", "latency_budget_ms", "budget")
    if latency is not None and isinstance(budget, int | float):
        level = float(bins(latency).values[-10:].mean())
        if level > budget:
            yield found(
                "warn",
                f"The latency ends at {number(level)} ms, above the budget of {number(float(budget))} ms.",
                metric=run.name("latency"),
                value=level,
                threshold=float(budget),
                cause="The controller still chooses expensive configurations.",
                remedy="Raise the weight of the latency penalty.",
                suffix="latency",
            )


def _violations(run: AnalysedRun, violations: Series) -> Iterator[Finding]:
    start, stop = longest_run(violations.values > run.limits["violation"])
    if stop - start > run.limits["violation_epochs"]:
        yield found(
            "warn",
            f"More than {percent(run.limits['violation'])} of the answers miss the budget for {stop - start} epochs.",
            metric=run.name("violation"),
            steps=steps_of(violations, start, stop),
            value=float(violations.values[start:stop].mean()),
            threshold=run.limits["violation"],
            cause="The penalty for missing the budget is too weak, or the budget cannot be met.",
            remedy="Raise the violation penalty, or the budget.",
            suffix="stuck",
        )
        return
    if len(violations) < run.limits["min_epochs"]:
        return
    last = float(violations.values[-5:].mean())
    warn, note = run.limits["violation_final_warn"], run.limits["violation_final_note"]
    if last >= note:
        is_improving = slope(violations).is_falling(run.limits["trend_p"])
        yield found(
            "warn" if last >= warn and not is_improving else "note",
            f"{percent(last)} of the answers still miss the budget at the end; below {percent(note)} is the aim"
            + ("; it is falling." if is_improving else "."),
            metric=run.name("violation"),
            value=last,
            threshold=warn if last >= warn else note,
            cause="Training is not finished, or the penalty is weak.",
            remedy="Train on while it falls; else raise the violation penalty.",
            suffix="final",
        )


RULES = (
    Rule("V35", "reward_trend", _rewards, ("reward",), ("grpo", "controller")),
    Rule("V36", "reward_hacking", _hacking),
    Rule("V39", "accuracy", _accuracy, ("accuracy",), ("controller",)),
    Rule("V40", "budget", _budget, profiles=("controller",)),
)
