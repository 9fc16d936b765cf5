"""Checks of results on held-out samples: the best step, overfitting, which checkpoint to take."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.detection.watches import judge_validations
from trainer.detection.window import curve_noise
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.checks import fail, finding, note, warn
from trainer.report.formatting import number, share
from trainer.report.result import Finding, Generalisation
from trainer.report.run_log import Series
from trainer.report.statistics import Floats, longest_run, noise, within

NUM_AROUND = 32
"""Training losses before a validation whose median is compared with it."""


@dataclass(frozen=True)
class Criterion:
    """What checkpoints are compared by; finite points."""

    metric: str
    points: Series
    sign: int = 1
    """-1 where lower is better."""


def val_losses(run: AnalysedRun) -> Series:
    """Return the validation loss; raises `NotJudged` where it is that of a policy: noise around 0."""
    val, train = run.get("val_loss"), run.find("loss")
    losses = [val.values, *([] if train is None else [train.values])]
    is_noise = run.profile == "grpo" and any(np.any(values <= 0) for values in losses)
    if is_noise or run.profile == "controller":
        raise NotJudged(
            "the loss is that of a policy, which changes its sign: rewards tell how good it is"
        )
    return val


def _criterion(run: AnalysedRun) -> Criterion | None:
    """Return the validation loss; of a policy its reward or accuracy on held-out samples; else the
    external results.
    """
    try:
        return Criterion("validation loss", val_losses(run), sign=-1)
    except NotJudged:
        pass
    for role in ("val_reward", "val_accuracy"):
        if (points := run.find(role)) is not None:
            return Criterion(run.name(role), points)
    return _external(run)


def _external(run: AnalysedRun) -> Criterion | None:
    """Return results that are better the higher, as a success rate is."""
    if not run.external:
        return None
    steps = sorted(run.external)
    values = np.array([run.external[step] for step in steps])
    return Criterion(run.external_name, Series(np.array(steps), values))


def train_losses_at(val: Series, train: Series | None) -> Floats:
    """Return the training loss around each validation: the median of the points since the one
    before; NaN without a training loss.
    """
    if train is None:
        return np.full(len(val), np.nan)
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum(np.concatenate(([0], stops[:-1])), stops - NUM_AROUND)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([np.median(train.values[a:b]) if b > a else np.nan for a, b in pairs])


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """Return the best step and the checkpoint to take; None where the run never validated and no
    external metric is given.
    """
    found = _criterion(run)
    if found is None:
        return None
    points, gap = found.points, np.nan
    values, verdicts = points.by_step(), [""] * len(points)
    if found.sign < 0:
        trained = train_losses_at(points, run.find("loss"))
        verdicts = judge_validations(points.values.tolist(), trained.tolist(), run.limits)
        gap = float(points.values[-1] - trained[-1])
    by_step = dict(zip(values, verdicts, strict=True))
    best = max(values, key=lambda step: found.sign * values[step])
    deciding = _external(run) or found
    decisive = deciding.points.by_step()
    step, path, reason = _recommended(run, deciding, values if found.sign < 0 else {})
    return Generalisation(
        metric=found.metric,
        values=values,
        best_step=best,
        best_value=values[best],
        last_value=float(points.values[-1]),
        gap=gap,
        verdicts=by_step,
        overfit_step=next((at for at, told in by_step.items() if told == "overfit"), None),
        recommended_step=step,
        recommended_path=path,
        reason=reason,
        expected_gain=deciding.sign * (decisive[step] - float(deciding.points.values[-1])),
    )


def _recommended(
    run: AnalysedRun, deciding: Criterion, losses: Mapping[int, float]
) -> tuple[int, Path | None, str]:
    """Return step, path and reason of the best checkpoint that exists; the best step where none is
    known to exist. Among equal results the validation loss decides.
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
    lost = f"; the best, {number(values[best])} at step {best}, was not kept"
    reason = (
        f"{lead} among the {len(kept)} checkpoints that exist, {number(values[kept[0]])}"
        f"{'' if kept[0] == best else lost}.{outranks}"
    )
    return kept[0], existing[kept[0]], reason


def _losses(run: AnalysedRun) -> Series:
    val = val_losses(run)
    if len(val) < run.limits["min_evals"]:
        raise NotJudged(f"{len(val)} validations, {int(run.limits['min_evals'])} are needed")
    return val


@finding("val_rising", "val_loss")
def validation_rises(run: AnalysedRun, _: Series) -> Iterator[Finding]:
    """Find the longest rise in a row where it is more than noise."""
    val, limits = _losses(run), run.limits
    rise = longest_run(np.diff(val.values) > 0)
    part = val[rise.start : rise.stop + 1]
    rises, is_to_the_end = len(part) - 1, rise.stop == len(val) - 1
    before, after = float(part.values[0]), float(part.values[-1])
    sigma = limits["overfit_note_sigma"] * curve_noise(val.values)
    if rises < limits["val_rises"] or after - before <= max(limits["overfit_note"] * before, sigma):
        return
    is_lasting = is_to_the_end and rises >= limits["val_rises_fail"]
    best = run.checkpoint(int(val.steps[int(np.argmin(val.values))]))
    yield (fail if is_lasting else warn)(
        f"The validation loss rose {rises} times in a row, from {number(before)} to "
        f"{number(after)}{', up to the end' if is_to_the_end else ''}.",
        steps=part.ends,
        cause="The model learns its samples by heart, or training has become unstable.",
        remedy=(f"Stop training and take {best}.",),
    )


@finding("overfit", "val_loss", "loss")
def overfitting(run: AnalysedRun, _: Series, losses: Series) -> Iterator[Finding]:
    val, told = _losses(run), generalisation(run)
    if told is None or told.overfit_step is None:
        return
    at = told.overfit_step
    kept = [state.step for state in run.log.checkpoints if state.is_complete]
    is_lost = bool(kept) and told.best_step not in kept and not run.external
    lost = " The checkpoint of the best step no longer exists." if is_lost else ""
    verdicts = [f"step {step}: {verdict}" for step, verdict in told.verdicts.items()]
    yield (fail if is_lost else warn)(
        f"Overfitting from step {at}: validation {number(told.values[at])} against "
        f"{number(told.best_value)} at step {told.best_step}, while training fell to "
        f"{number(float(within(losses, 0, at).values[-1]))}.",
        steps=(told.best_step, int(val.steps[-1])),
        evidence=[*(verdict for verdict in verdicts if not verdict.endswith("ok")), told.reason],
        cause=f"More passes over the samples than they can teach.{lost}",
        remedy=(
            f"Use {run.checkpoint(told.recommended_step or told.best_step)}; next time stop there, "
            "with {epochs} lower or more data.",
        ),
    )


@finding("val_train_disagree", "val_loss", "loss")
def disagreement(run: AnalysedRun, _: Series, train: Series) -> Iterator[Finding]:
    val, limit = _losses(run), run.limits["gap"]
    last, trained = float(val.values[-1]), float(train_losses_at(val, train)[-1])
    part = (last - trained) / abs(last) if last else 0.0
    if part > limit:
        yield note(
            f"Validation ({number(last)}) and training loss ({number(trained)}) are apart by "
            f"{share(part)} of the validation loss.",
            steps=val[-1:].ends,
            cause="Overfitting, or validation samples of another kind than the training samples.",
            remedy=("Trust the validation loss; compare samples of both sets.",),
        )


@finding("val_leak", "val_loss", "loss", profile=["sft"])
def leaked(run: AnalysedRun, _: Series, train: Series) -> Iterator[Finding]:
    """Find a validation loss that stays lower than the training loss by more than their noise."""
    val = _losses(run)
    late = val[len(val) // 2 :]
    trained = train_losses_at(val, train)[len(val) // 2 :]
    sigma = curve_noise(val.values) + noise(train) / NUM_AROUND**0.5
    lead = float(np.min(trained - late.values))
    if len(late) >= run.limits["min_evals"] and lead > max(4 * sigma, 0.1 * float(trained.max())):
        yield note(
            f"The validation loss ({number(late.values[-1])}) stays below the training loss "
            f"({number(trained[-1])}) by more than their noise.",
            steps=late.ends,
            cause="Validation rows are among the training rows, or validation is another, easier "
            "kind of data.",
            remedy=(
                "Look for validation rows in the training files; compare samples of both sets.",
            ),
        )
