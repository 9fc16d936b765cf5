"""Results on held-out samples: the best step, overfitting, and which of the existing checkpoints to take."""

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
EXTERNAL = "external result"


@dataclass(frozen=True)
class Criterion:
    """What checkpoints are compared by; finite points."""

    metric: str
    points: Series
    is_loss: bool
    """Lower is better."""

    @property
    def costs(self) -> Floats:
        return self.points.values if self.is_loss else -self.points.values


@dataclass(frozen=True)
class Judgement:
    verdicts: tuple[str, ...]
    """ok, note or overfit for each validation."""
    best: int
    """Index of the lowest validation loss."""
    overfit: int | None
    """Index of the first overfit."""


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
        return Criterion("validation loss", val_losses(run), is_loss=True)
    except NotJudged:
        pass
    for role in RESULTS:
        if (points := run.find(role)) is not None:
            return Criterion(run.name(role), points, is_loss=False)
    return _external(run.external) if run.external else None


def _external(results: Mapping[int, float]) -> Criterion:
    """Higher is better, as for a success rate."""
    steps = sorted(results)
    return Criterion(EXTERNAL, Series(np.array(steps), np.array([results[step] for step in steps])), is_loss=False)


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


def judged(run: AnalysedRun) -> Judgement:
    """Raises `NotJudged` without a validation loss that can be judged."""
    val = val_losses(run)
    return judge_validations(val.values, train_losses_at(val, run.find("loss")), run.limits)


def judge_validations(val_losses: Floats, train_losses: Floats, limits: Mapping[str, float]) -> Judgement:
    """NOTE: clearly above the best so far. OVERFIT: the second in a row, or far above, while training still improves.

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
    overfit = verdicts.index("overfit") if "overfit" in verdicts else None
    return Judgement(tuple(verdicts), int(np.argmin(val_losses)), overfit)


def relative_noise(losses: Floats) -> float:
    """Noise of a validation curve over its level; 0 with fewer than five points."""
    return curve_noise(losses) / float(np.median(losses))


def generalisation(run: AnalysedRun) -> Generalisation | None:
    """None where the run never validated and no external metric is given."""
    found = _criterion(run)
    if found is None:
        return None
    points, gap, overfit = found.points, np.nan, None
    steps, values = points.steps.tolist(), points.values.tolist()
    verdicts: tuple[str, ...] = ("",) * len(points)
    if found.is_loss:
        judgement = judged(run)
        verdicts, overfit = judgement.verdicts, judgement.overfit
        gap = float(points.values[-1] - train_losses_at(points, run.find("loss"))[-1])
    best = int(np.argmin(found.costs))
    deciding = _external(run.external) if run.external else found
    step, path, reason = _recommended(run, deciding)
    at = int(np.argmin(np.abs(deciding.points.steps - step)))
    return Generalisation(
        metric=found.metric,
        values=dict(zip(steps, values, strict=True)),
        best_step=steps[best],
        best_value=values[best],
        last_value=values[-1],
        gap=gap,
        verdicts=dict(zip(steps, verdicts, strict=True)),
        overfit_step=None if overfit is None else steps[overfit],
        recommended_step=step,
        recommended_path=path,
        reason=reason,
        expected_gain=float(deciding.costs[-1] - deciding.costs[at]),
    )


def _recommended(run: AnalysedRun, deciding: Criterion) -> tuple[int, Path | None, str]:
    """(step, path, reason): the best of the checkpoints that exist; the best step where none is known to exist."""
    existing = {state.step: state.path for state in run.log.checkpoints if state.is_complete}
    steps = deciding.points.steps.tolist()
    costs = dict(zip(steps, deciding.costs.tolist(), strict=True))
    values = dict(zip(steps, deciding.points.values.tolist(), strict=True))
    kept = [step for step in costs if step in existing]
    best = min(costs, key=lambda step: costs[step])
    lead = f"{'Lowest' if deciding.is_loss else 'Highest'} {deciding.metric}"
    outranks = " It outranks the validation loss." if deciding.metric == EXTERNAL else ""
    if not kept:
        none = "no checkpoint is known" if not existing else "no complete checkpoint was validated"
        return best, None, f"{lead}, {number(values[best])}; {none}.{outranks}"
    step = min(kept, key=lambda step: costs[step])
    lost = "" if step == best else f"; the best, {number(values[best])} at step {best}, was not kept"
    reason = f"{lead} among the {len(kept)} checkpoints that exist, {number(values[step])}{lost}."
    return step, existing[step], reason + outranks
