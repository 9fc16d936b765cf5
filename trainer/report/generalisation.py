"""Results on held-out samples: the best step, overfitting, and which of the existing checkpoints to take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.detection.robust import curve_noise
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.formatting import number
from trainer.report.result import Generalisation
from trainer.report.run_log import Series
from trainer.report.statistics import Floats

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

    def value_at(self) -> dict[int, float]:
        return dict(zip(self.points.steps.tolist(), self.points.values.tolist(), strict=True))


def val_losses(run: AnalysedRun) -> Series:
    """Raises `NotJudged` without a validation loss, or where it is that of a policy: noise around 0."""
    val, train = run.get("val_loss"), run.find("loss")
    if run.profile in ("grpo", "controller"):
        losses = [val.values, *([] if train is None else [train.values])]
        if run.profile == "controller" or any(np.any(values <= 0) for values in losses):
            raise NotJudged("the loss is that of a policy, which changes its sign: rewards tell how good it is")
    return val


def _criterion(run: AnalysedRun) -> Criterion | None:
    """The validation loss; of a policy its reward or accuracy on held-out samples; else the external results."""
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
    return Criterion(run.external_name, Series(np.array(steps), np.array([run.external[step] for step in steps])))


def train_losses_at(val: Series, train: Series | None) -> Floats:
    """Training loss around each validation: the median of the points since the one before; NaN without a training loss.

    A log that writes both only then gives the very point.
    """
    if train is None:
        return np.full(len(val), np.nan)
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum(np.concatenate(([0], stops[:-1])), stops - NUM_AROUND)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([np.median(train.values[a:b]) if b > a else np.nan for a, b in pairs])


def judge_validations(val_losses: Floats, train_losses: Floats, limits: Mapping[str, float]) -> list[str]:
    """note: clearly above the best so far; overfit: the second in a row, or far above, while training still improves.

    `train_losses` are those around each validation; both arrays have one entry per validation. Where the training loss
    too is above that of the best until the next validation, the run has become unstable and does not overfit.
    """
    sigma = relative_noise(val_losses)
    note = max(limits["overfit_note"], limits["overfit_note_sigma"] * sigma)
    sure = max(limits["overfit_sure"], limits["overfit_sure_sigma"] * sigma)
    verdicts: list[str] = []
    best = 0
    for index, loss in enumerate(val_losses):
        if loss < val_losses[best]:
            best = index
        rise = loss / val_losses[best] - 1
        around = train_losses[index : index + 2]
        has_fallen = bool(np.all(around < train_losses[best] * (1 - limits["overfit_train_fall"])))
        is_second = bool(verdicts) and verdicts[-1] != "ok"
        is_overfit = has_fallen and (is_second or rise > sure)
        verdicts.append("ok" if rise <= note else "overfit" if is_overfit else "note")
    return verdicts


def relative_noise(losses: Floats) -> float:
    """Noise of a validation curve over its level; 0 with fewer than five points, infinite at level 0."""
    noise, level = curve_noise(losses), float(np.median(losses))
    return noise / level if level else math.inf if noise else 0.0


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """None where the run never validated and no external metric is given."""
    found = _criterion(run)
    if found is None:
        return None
    points, values, gap = found.points, found.value_at(), np.nan
    verdicts = [""] * len(points)
    if found.sign < 0:
        trained = train_losses_at(points, run.find("loss"))
        verdicts = judge_validations(points.values, trained, run.limits)
        gap = float(points.values[-1] - trained[-1])
    best = max(values, key=lambda step: found.sign * values[step])
    deciding = _external(run) or found
    decisive = deciding.value_at()
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
        overfit_step=next((at for at, verdict in zip(values, verdicts, strict=True) if verdict == "overfit"), None),
        recommended_step=step,
        recommended_path=path,
        reason=reason,
        expected_gain=deciding.sign * (decisive[step] - float(deciding.points.values[-1])),
    )


def _recommended(run: AnalysedRun, deciding: Criterion, losses: Mapping[int, float]) -> tuple[int, Path | None, str]:
    """(step, path, reason): the best of the checkpoints that exist; the best step where none is known to exist.

    Among equal results (few samples give few values) the validation loss decides.
    """
    existing = {state.step: state.path for state in run.log.checkpoints if state.is_complete}
    values = deciding.value_at()
    ranked = sorted(values, key=lambda step: (-deciding.sign * values[step], losses.get(step, math.inf)))
    best, kept = ranked[0], [step for step in ranked if step in existing]
    lead = f"{'Lowest' if deciding.sign < 0 else 'Highest'} {deciding.metric}"
    outranks = " It outranks the validation loss." if run.external else ""
    if not kept:
        none = "no checkpoint is known" if not existing else "no complete checkpoint was validated"
        return best, None, f"{lead}, {number(values[best])}; {none}.{outranks}"
    step = kept[0]
    lost = "" if step == best else f"; the best, {number(values[best])} at step {best}, was not kept"
    reason = f"{lead} among the {len(kept)} checkpoints that exist, {number(values[step])}{lost}."
    return step, existing[step], reason + outranks
