"""Checks of results on held-out samples: the best step, overfitting, the checkpoint to take."""

import math
from typing import NamedTuple

import numpy as np

from trainer.runtime.evaluations import deciding
from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.checks import Findings, fail, finding, warn
from trainer.tools.report.checks_curves import rise_of
from trainer.tools.report.formatting import number
from trainer.tools.report.result import Generalisation
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import Floats, is_falling, noise, runs, within
from trainer.train.detection.validations import NOTE_RISE, NOTE_SIGMAS, judge_validations
from trainer.train.detection.window import curve_noise

NUM_AROUND = 32
"""A validation loss is compared with the median of up to this many training losses before it."""
MIN_EVALS = 3
MIN_RISES, FATAL_RISES = 3, 5
"""The number of consecutive rises of the validation loss that are a fault; and the number that are
a fatal one if they last to the end of the run.
"""
LEAK_LEAD, LEAK_SIGMA = 0.1, 4
"""Validation data has leaked if its loss is below the training loss by more than this share of it
and by more than this many standard deviations of their noise.
"""


class Criterion(NamedTuple):
    """The metric by which checkpoints are compared, with its finite points."""

    metric: str
    points: Series
    sign: int = 1
    """-1 where lower is better."""


def _losses(run: AnalysedRun, *, least: int = MIN_EVALS) -> tuple[Series, Floats]:
    """Return the validation losses, and the level of the training loss at each of them.

    The level is the median of the training losses since the previous validation, at most
    `NUM_AROUND` of them; NaN if there are none. Raises `NotJudged` for fewer than `least`
    validations, and for a policy, whose loss is noise around 0.
    """
    val, train = run.get("val_loss", least=least), run.find("loss")
    losses = [val.values.min(), train.values.min() if train else np.inf]
    if run.profile == "controller" or (run.profile == "grpo" and min(losses) <= 0):
        raise NotJudged(
            "the loss is that of a policy, which changes its sign: rewards tell how good it is"
        )
    if not train:
        return val, np.full(len(val), np.nan)
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum([0, *stops[:-1]], stops - NUM_AROUND)
    pairs = zip(starts, stops, strict=True)
    return val, np.array([np.median(train.values[a:b]) if b > a else np.nan for a, b in pairs])


def _measured(run: AnalysedRun) -> Criterion | None:
    """Return the validation loss, or for a policy its reward or accuracy on held-out samples."""
    try:
        return Criterion("validation loss", _losses(run, least=1)[0], sign=-1)
    except NotJudged:
        results = (
            Criterion(run.name(role), points)
            for role in ("val_reward", "val_accuracy")
            if (points := run.find(role))
        )
        return next(results, None)


def _evaluated(run: AnalysedRun) -> Criterion | None:
    """Return the results of the evaluation that selects the checkpoint; higher is better."""
    name = deciding(run.log.evaluations)
    if name is None:
        return None
    means = {step: float(row["mean"]) for step, row in sorted(run.log.evaluations[name].items())}
    return Criterion(name, Series(np.array([*means]), np.array([*means.values()])))


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """Return the best step and the recommended checkpoint; None if the run has no validations and
    no evaluations.

    The recommended checkpoint is the complete one with the best result, or the best step if no
    complete checkpoint has a result. An evaluation outranks the validation loss, which decides
    between equal results.
    """
    evaluated = _evaluated(run)
    measured = _measured(run) or evaluated
    if measured is None:
        return None
    values, verdicts = measured.points.by_step(), {}
    if measured.sign < 0:
        _, trained = _losses(run, least=1)
        told = judge_validations(measured.points.values.tolist(), trained.tolist())
        verdicts = dict(zip(values, told, strict=True))
    best = max(values, key=lambda step: measured.sign * values[step])
    decisive = evaluated or measured
    results = decisive.points.by_step()

    def rank(step: int) -> tuple[float, float]:
        second = measured.sign * values[step] if step in values else -math.inf
        return decisive.sign * results[step], second

    existing = {state.step: state.path for state in run.log.checkpoints if state.is_complete}
    kept = max(sorted(existing.keys() & results.keys()), key=rank, default=None)
    wanted = max(results, key=rank)
    reason = f"{'Lowest' if decisive.sign < 0 else 'Highest'} {decisive.metric}, "
    if kept is None:
        none = "no complete checkpoint was validated" if existing else "no checkpoint is known"
        reason += f"{number(results[wanted])}; {none}."
    else:
        reason += f"{number(results[kept])}, of the checkpoints that exist."
    if kept not in (None, wanted):
        reason += f" The best, {number(results[wanted])} at step {wanted}, was not kept."
    if evaluated:
        reason += " It outranks the validation loss."
    return Generalisation(
        metric=measured.metric,
        values=values,
        best_step=best,
        best_value=values[best],
        last_value=float(measured.points.values[-1]),
        verdicts=verdicts,
        overfit_step=next((at for at, told in verdicts.items() if told == "overfit"), None),
        recommended_step=wanted if kept is None else kept,
        recommended_path=None if kept is None else existing[kept],
        reason=reason,
    )


@finding("val_rising", "val_loss")
def validation_rises(run: AnalysedRun, _: Series) -> Findings:
    """Find the longest run of consecutive rises, if the loss rose by more than noise."""
    val, _trained = _losses(run)
    begins, ends = runs(np.diff(val.values) > 0)
    rises = max(ends - begins, default=0)
    if rises < MIN_RISES:
        return
    longest = int(np.argmax(ends - begins))
    part, is_to_the_end = val[begins[longest] : ends[longest] + 1], ends[longest] == len(val) - 1
    before, after = part.values[0], part.values[-1]
    if after - before <= max(NOTE_RISE * before, NOTE_SIGMAS * curve_noise(val.values)):
        return
    best = val.steps[np.argmin(val.values)]
    yield (fail if is_to_the_end and rises >= FATAL_RISES else warn)(
        f"The validation loss rose {rises} times in a row, from {number(before)} to "
        f"{number(after)}{', up to the end' if is_to_the_end else ''}.",
        steps=part.ends,
        cause="The model learns its samples by heart, or training has become unstable.",
        remedy=(f"Stop training and take {run.checkpoint(best)}.",),
    )


@finding("overfit", "val_loss", "loss")
def overfitting(run: AnalysedRun, _: Series, train: Series) -> Findings:
    """Find the step from which on the validation loss is clearly above its best while the training
    loss falls.
    """
    val, _trained = _losses(run)
    told = generalisation(run)
    if told is None or told.overfit_step is None:
        return
    at, kept = told.overfit_step, [one.step for one in run.log.checkpoints if one.is_complete]
    is_lost = bool(kept) and told.best_step not in kept and not _evaluated(run)
    lost = " The checkpoint of the best step no longer exists." if is_lost else ""
    yield (fail if is_lost else warn)(
        f"Overfitting from step {at}: validation {number(told.values[at])} against "
        f"{number(told.best_value)} at step {told.best_step}, while training fell to "
        f"{number(within(train, 0, at).values[-1])}.",
        steps=(told.best_step, val.steps[-1]),
        evidence=[told.reason],
        cause=f"More passes over the samples than they can teach.{lost}",
        remedy=(
            f"Use {run.checkpoint(told.recommended_step or told.best_step)}; next time stop there, "
            "with {epochs} lower or more data.",
        ),
    )


@finding("val_leak", "val_loss", "loss", profiles=("sft",))
def leaked(run: AnalysedRun, _: Series, train: Series) -> Findings:
    """Find a validation loss that stays lower than the training loss by more than their noise."""
    val, trained = _losses(run)
    sigma = curve_noise(val.values) + noise(train.values) / NUM_AROUND**0.5
    lead = np.nanmin(trained - val.values)
    # the levels are comparable only for pretrained weights and a loss that falls steadily
    is_learning = run.is_pretrained and rise_of(train) is None and is_falling(train)
    if is_learning and lead > max(LEAK_SIGMA * sigma, LEAK_LEAD * np.nanmedian(trained)):
        yield warn(
            f"The validation loss ({number(val.values[-1])}) stays below the training loss "
            f"({number(trained[-1])}) by more than the noise.",
            steps=val.ends,
            cause="Validation rows are among the training rows, or the validation data is easier.",
            remedy=(
                "Look for validation rows in the training files; compare samples of both sets.",
            ),
        )
