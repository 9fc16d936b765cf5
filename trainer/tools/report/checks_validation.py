"""Checks of results on held-out samples: the best step, overfitting, the recommended checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.runtime.evaluations import deciding, sign_of
from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.checks import Findings, fail, finding, warn
from trainer.tools.report.checks_curves import rise_of
from trainer.tools.report.formatting import number
from trainer.tools.report.result import Generalisation
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import Floats, is_falling, runs, within
from trainer.train.detection.validations import NOTE_RISE, NOTE_SIGMAS, judge_validations
from trainer.train.detection.window import curve_noise, noise

NUM_AROUND = 32
"""A validation loss is compared with the median of up to this many training losses before it."""
MIN_EVALS = 3
MIN_RISES = 3
FATAL_RISES = 5
"""The number of consecutive rises of the validation loss that count as a fault, and the number that
count as fatal if they last to the end of the run.
"""
LEAK_LEAD = 0.1
LEAK_SIGMA = 4
"""Validation data has leaked if its loss is below the training loss by more than this share and by
more than this many standard deviations of the noise.
"""


@dataclass(frozen=True)
class Criterion:
    """The metric by which checkpoints are compared, with its value at each step."""

    metric: str
    values: Mapping[int, float]
    sign: int = 1
    """-1 where lower is better."""

    def rank(self, step: int) -> float:
        """Return a number that is higher for a better step, and lowest for a step without a value."""
        return self.sign * self.values.get(step, -self.sign * math.inf)


def _val_losses(run: AnalysedRun, *, least: int = MIN_EVALS) -> Series:
    """Return the validation losses.

    Raises `NotJudged` if there are fewer than `least` of them, or if the run trains a policy, whose
    loss is noise around 0.
    """
    val = run.get("val_loss", least=least)
    lowest = np.concatenate([val.values, run.find("loss").values]).min()
    if run.profile == "controller" or (run.profile == "grpo" and lowest <= 0):
        raise NotJudged("the loss of a policy changes its sign; its rewards show its quality")
    return val


def _trained(run: AnalysedRun, val: Series) -> Floats:
    """Return the level of the training loss at each validation.

    It is the median of the training losses since the previous validation, at most `NUM_AROUND` of
    them; NaN if there are none.
    """
    train = run.find("loss")
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum([0, *stops[:-1]], stops - NUM_AROUND)
    parts = [train.values[a:b] for a, b in zip(starts, stops, strict=True)]
    return np.array([np.median(part) if len(part) else np.nan for part in parts])


def _measured(run: AnalysedRun) -> Criterion | None:
    """Return the validation loss, or for a policy its reward or accuracy on held-out samples."""
    try:
        return Criterion("validation loss", _val_losses(run, least=1).by_step(), sign=-1)
    except NotJudged:
        results = (
            Criterion(run.name(role), points.by_step())
            for role in ("val_reward", "val_accuracy")
            if (points := run.find(role))
        )
        return next(results, None)


def _evaluated(run: AnalysedRun) -> Criterion | None:
    """Return the results of the evaluation that selects the checkpoint."""
    name = deciding(run.log.evaluations)
    if name is None:
        return None
    rows = run.log.evaluations[name]
    values = {step: float(rows[step]["mean"]) for step in sorted(rows)}
    return Criterion(name, values, sign_of(name, rows))


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """Return the best step and the recommended checkpoint; None if the run has no validations and
    no evaluations.

    The recommended checkpoint is the complete one with the best result, or the best step if no
    complete checkpoint has a result. An evaluation takes precedence over the validation loss, which
    breaks ties.
    """
    evaluated = _evaluated(run)
    measured = _measured(run) or evaluated
    if measured is None:
        return None
    values = measured.values
    verdicts = {}
    if measured.sign < 0 and measured is not evaluated:
        trained = _trained(run, run.find("val_loss")).tolist()
        told = judge_validations(list(values.values()), trained)
        verdicts = dict(zip(values, told, strict=True))
    best = max(values, key=measured.rank)
    decisive = evaluated or measured
    results = decisive.values

    def rank(step: int) -> tuple[float, float]:
        return decisive.rank(step), measured.rank(step)

    wanted = max(results, key=rank)
    chosen = max(sorted(run.kept.keys() & results.keys()), key=rank, default=None)
    which = ", of the checkpoints that exist"
    if chosen is None:
        chosen = wanted
        which = "; no complete checkpoint was validated" if run.kept else "; no checkpoint is known"
    extreme = "Lowest" if decisive.sign < 0 else "Highest"
    reason = f"{extreme} {decisive.metric}, {number(results[chosen])}{which}."
    if chosen != wanted:
        reason += f" The best, {number(results[wanted])} at step {wanted}, was not kept."
    if evaluated:
        reason += " It takes precedence over the validation loss."
    return Generalisation(
        metric=measured.metric,
        values=values,
        best_step=best,
        best_value=values[best],
        last_value=list(values.values())[-1],
        verdicts=verdicts,
        overfit_step=next((at for at, told in verdicts.items() if told == "overfit"), None),
        recommended_step=chosen,
        recommended_path=run.kept.get(chosen),
        reason=reason,
    )


@finding("val_rising", "val_loss")
def validation_rises(run: AnalysedRun, _: Series) -> Findings:
    """Find the longest run of consecutive rises, if the loss rose by more than noise."""
    val = _val_losses(run)
    begins, ends = runs(np.diff(val.values) > 0)
    rises = max(ends - begins, default=0)
    if rises < MIN_RISES:
        return
    longest = int(np.argmax(ends - begins))
    part = val[begins[longest] : ends[longest] + 1]
    is_to_the_end = ends[longest] == len(val) - 1
    before = part.values[0]
    after = part.values[-1]
    if after - before <= max(NOTE_RISE * before, NOTE_SIGMAS * curve_noise(val.values)):
        return
    best = val.steps[np.argmin(val.values)]
    yield (fail if is_to_the_end and rises >= FATAL_RISES else warn)(
        f"The validation loss rose {rises} times in a row, from {number(before)} to "
        f"{number(after)}{', until the end' if is_to_the_end else ''}.",
        steps=part.ends,
        reason="memorizes",
        remedy=(f"Stop training and use {run.checkpoint(best)}.",),
    )


@finding("overfit", "val_loss", "loss")
def overfitting(run: AnalysedRun, _: Series, train: Series) -> Findings:
    """Find the step after which the validation loss is clearly above its best while the training
    loss falls.
    """
    val = _val_losses(run)
    told = generalisation(run)
    if not told or told.overfit_step is None:
        return
    at = told.overfit_step
    is_lost = bool(run.kept) and told.best_step not in run.kept and not _evaluated(run)
    lost = " The checkpoint of the best step no longer exists." if is_lost else ""
    yield (fail if is_lost else warn)(
        f"Overfitting from step {at}: validation {number(told.values[at])} against "
        f"{number(told.best_value)} at step {told.best_step}, while training fell to "
        f"{number(within(train, 0, at).values[-1])}.",
        steps=(told.best_step, val.steps[-1]),
        evidence=[told.reason],
        cause=f"The model saw the samples too often to learn anything new from them.{lost}",
        remedy=(
            f"Use {run.checkpoint(told.recommended_step or told.best_step)}; next time, "
            "stop there, or train with fewer {epochs} or more data.",
        ),
    )


@finding("val_leak", "val_loss", "loss", profiles="sft")
def leaked(run: AnalysedRun, _: Series, train: Series) -> Findings:
    """Find a validation loss that stays lower than the training loss by more than the noise."""
    val = _val_losses(run)
    trained = _trained(run, val)
    sigma = curve_noise(val.values) + noise(train.values) / NUM_AROUND**0.5
    lead = np.nanmin(trained - val.values)
    # the levels are comparable only for pretrained weights and a loss that falls steadily
    is_learning = run.is_pretrained and rise_of(train) is None and is_falling(train)
    if is_learning and lead > max(LEAK_SIGMA * sigma, LEAK_LEAD * np.nanmedian(trained)):
        yield warn(
            f"The validation loss ({number(val.values[-1])}) stays below the training loss "
            f"({number(trained[-1])}) by more than the noise.",
            steps=val.ends,
            reason="leak",
        )
