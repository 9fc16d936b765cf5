"""Results on held-out samples: the best step, overfitting, which checkpoint to take, and what
is measured of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.detection.watches import judge_validations
from trainer.detection.window import curve_noise
from trainer.report.advice import lower_rate
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.checks import Told, fail, finding, in_order, note, warn
from trainer.report.checks_policy import collapse
from trainer.report.formatting import number, share
from trainer.report.result import Generalisation
from trainer.report.run_log import Series
from trainer.report.shapes import shift
from trainer.report.statistics import Floats, longest_run, slope

NUM_AROUND = 32
"""Training losses before a validation whose median is compared with it."""
RESULTS = ("val_reward", "val_accuracy")
"""Roles of held-out results, what is optimised first."""


@dataclass(frozen=True)
class Criterion:
    """What checkpoints are compared by; finite points."""

    metric: str
    points: Series
    sign: int = 1
    """-1 where lower is better."""


def val_losses(run: AnalysedRun) -> Series:
    """Raises `NotJudged` without a validation loss, or where it is that of a policy: noise
    around 0.
    """
    val, train = run.get("val_loss"), run.find("loss")
    if run.profile in ("grpo", "controller"):
        losses = [val.values, *([] if train is None else [train.values])]
        if run.profile == "controller" or any(np.any(values <= 0) for values in losses):
            raise NotJudged(
                "the loss is that of a policy, which changes its sign: rewards tell how good it is"
            )
    return val


def _criterion(run: AnalysedRun) -> Criterion | None:
    """The validation loss; of a policy its reward or accuracy on held-out samples; else the
    external results.
    """
    try:
        return Criterion("validation loss", val_losses(run), sign=-1)
    except NotJudged:
        pass
    for role in RESULTS:
        if (points := run.find(role)) is not None:
            return Criterion(run.name(role), points)
    return _external(run)


def _external(run: AnalysedRun) -> Criterion | None:
    """Higher is better, as for a success rate."""
    if not run.external:
        return None
    steps = sorted(run.external)
    return Criterion(
        run.external_name, Series(np.array(steps), np.array([run.external[step] for step in steps]))
    )


def train_losses_at(val: Series, train: Series | None) -> Floats:
    """Training loss around each validation: the median of the points since the one before; NaN
    without a training loss.

    A log that writes both only then gives the very point.
    """
    if train is None:
        return np.full(len(val), np.nan)
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum(np.concatenate(([0], stops[:-1])), stops - NUM_AROUND)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([np.median(train.values[a:b]) if b > a else np.nan for a, b in pairs])


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """None where the run never validated and no external metric is given."""
    found = _criterion(run)
    if found is None:
        return None
    points, gap = found.points, np.nan
    values = points.by_step()
    verdicts = [""] * len(points)
    if found.sign < 0:
        trained = train_losses_at(points, run.find("loss"))
        verdicts = judge_validations(points.values.tolist(), trained.tolist(), run.limits)
        gap = float(points.values[-1] - trained[-1])
    best = max(values, key=lambda step: found.sign * values[step])
    deciding = _external(run) or found
    decisive = deciding.points.by_step()
    losses = values if found.sign < 0 else {}
    step, path, reason = _recommended(run, deciding, losses)
    return Generalisation(
        metric=found.metric,
        values=values,
        best_step=best,
        best_value=values[best],
        last_value=float(points.values[-1]),
        gap=gap,
        verdicts=dict(zip(values, verdicts, strict=True)),
        overfit_step=next(
            (at for at, verdict in zip(values, verdicts, strict=True) if verdict == "overfit"), None
        ),
        recommended_step=step,
        recommended_path=path,
        reason=reason,
        expected_gain=deciding.sign * (decisive[step] - float(deciding.points.values[-1])),
    )


def _recommended(
    run: AnalysedRun, deciding: Criterion, losses: Mapping[int, float]
) -> tuple[int, Path | None, str]:
    """(step, path, reason): the best of the checkpoints that exist; the best step where none is
    known to exist.

    Among equal results (few samples give few values) the validation loss decides.
    """
    existing = {state.step: state.path for state in run.log.checkpoints if state.is_complete}
    values = deciding.points.by_step()
    ranked = sorted(
        values, key=lambda step: (-deciding.sign * values[step], losses.get(step, math.inf))
    )
    best, kept = ranked[0], [step for step in ranked if step in existing]
    lead = f"{'Lowest' if deciding.sign < 0 else 'Highest'} {deciding.metric}"
    outranks = " It outranks the validation loss." if run.external else ""
    if not kept:
        none = "no checkpoint is known" if not existing else "no complete checkpoint was validated"
        return best, None, f"{lead}, {number(values[best])}; {none}.{outranks}"
    step = kept[0]
    lost = (
        "" if step == best else f"; the best, {number(values[best])} at step {best}, was not kept"
    )
    reason = f"{lead} among the {len(kept)} checkpoints that exist, {number(values[step])}{lost}."
    return step, existing[step], reason + outranks


def _losses(run: AnalysedRun) -> Series:
    val = val_losses(run)
    if len(val) < run.limits["min_evals"]:
        raise NotJudged(f"{len(val)} validations, {int(run.limits['min_evals'])} are needed")
    return val


@finding("val_rising", "V16", "val_loss")
def validation_rises(run: AnalysedRun, _: Series) -> Iterator[Told]:
    """The longest rise in a row where it is more than noise, and the last loss."""
    val, limits = _losses(run), run.limits
    start, stop = longest_run(np.diff(val.values) > 0)
    rises, is_to_the_end = stop - start, stop == len(val) - 1
    before, after = float(val.values[start]), float(val.values[stop])
    least = max(
        limits["overfit_note"] * before, limits["overfit_note_sigma"] * curve_noise(val.values)
    )
    is_lasting = is_to_the_end and rises >= limits["val_rises_fail"]
    if rises >= limits["val_rises"] and after - before > least:
        end = ", up to the end" if is_to_the_end else ""
        best = run.checkpoint(int(val.steps[int(np.argmin(val.values))]))
        yield (fail if is_lasting else warn)(
            f"The validation loss rose {rises} times in a row, from {number(before)} to "
            f"{number(after)}{end}.",
            steps=val[start : stop + 1].ends,
            value=rises,
            limit=limits["val_rises_fail" if is_lasting else "val_rises"],
            cause="The model learns its samples by heart, or training has become unstable.",
            remedy=f"Stop training and take {best}.",
            line="val_not_rising",
        )
    else:
        yield in_order("val_not_rising", "no rise beyond noise")
    run.require_pretrained()
    last, low, high = float(val.values[-1]), limits["val_final_low"], limits["val_final_high"]
    if run.profile == "sft" and not low <= last <= high:
        yield note(
            f"The validation loss ends at {number(last)}; {number(low)} to {number(high)} is usual.",
            id="final",
            steps=val[-1:].ends,
            value=last,
            limit=high if last > high else low,
        )


@finding("overfit", "V17", "val_loss", "loss")
def overfitting(run: AnalysedRun, _: Series, losses: Series) -> Iterator[Told]:
    val, told = _losses(run), generalisation(run)
    if told is None or told.overfit_step is None:
        return
    at, loss = told.overfit_step, told.values[told.overfit_step]
    trained = float(train_losses_at(val, losses)[int(np.searchsorted(val.steps, at))])
    kept = any(state.is_complete for state in run.log.checkpoints)
    is_lost = kept and told.recommended_step != told.best_step and not run.external
    good = run.checkpoint(told.recommended_step or told.best_step)
    verdicts = [
        f"step {step}: {verdict}" for step, verdict in told.verdicts.items() if verdict != "ok"
    ][:10]
    lost = " The checkpoint of the best step no longer exists." if is_lost else ""
    yield (fail if is_lost else warn)(
        f"Overfitting from step {at}: validation {number(loss)} against {number(told.best_value)} "
        f"at step {told.best_step}, while training fell to {number(trained)}.",
        steps=(told.best_step, int(val.steps[-1])),
        value=loss / told.best_value - 1,
        limit=run.limits["overfit_sure"],
        evidence=[*verdicts, told.reason],
        cause=f"More passes over the samples than they can teach.{lost}",
        remedy=f"Use {good}; next time stop there, with {run.options['epochs']} lower or more data.",
    )


@finding("val_train_disagree", "V18", "val_loss", "loss")
def disagreement(run: AnalysedRun, _: Series, train: Series) -> Iterator[Told]:
    """How far validation and training loss are apart, and whether they part from the start."""
    val, limit = _losses(run), run.limits["gap"]
    last, trained = float(val.values[-1]), float(train_losses_at(val, train)[-1])
    gap = last - trained
    if np.isfinite(gap) and gap > limit * abs(last) > 0:
        yield note(
            f"Validation ({number(last)}) and training loss ({number(trained)}) are {number(gap)} "
            f"apart, {share(gap / abs(last))} of the validation loss.",
            steps=val[-1:].ends,
            value=gap / abs(last),
            limit=limit,
            cause="Overfitting, or validation samples of another kind than the training samples.",
            remedy="Trust the validation loss; compare samples of both sets.",
        )
    p = run.limits["trend_p"]
    if slope(train).is_falling(p) and slope(val).is_rising(p) and int(np.argmin(val.values)) == 0:
        yield note(
            "Validation gets worse from the first evaluation on, while the training loss falls.",
            id="opposite",
            steps=val.ends,
            cause="The validation set is of another kind, or the learning rate destroys what the "
            "model knew.",
            remedy=["Compare samples of both sets.", lower_rate(run)],
        )


@finding("val_results", "V45")
def lost_results(run: AnalysedRun) -> Iterator[Told]:
    """Held-out rewards and accuracies that had been reached and are lost."""
    present = [role for role in RESULTS if run.key(role) is not None]
    if not present:
        raise NotJudged("the log has no val/reward_mean and no val/accuracy_mean")
    for role in present:
        if run.find(role) is not None and (move := shift(run, role, sign=-1)):
            yield collapse(run, move)
