"""Training against validation: the best step, overfitting, and which of the existing checkpoints to take."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.report.overfit import Judgement, judge
from trainer.report.phrases import number
from trainer.report.result import Generalisation
from trainer.report.run import Run
from trainer.report.run_log import CheckpointState, Series
from trainer.report.statistics import Floats

NUM_AROUND = 32
"""Training losses before a validation whose median is compared with it."""


def train_losses_at(val: Series, train: Series | None) -> Floats:
    """Training loss around each validation: the median of the points since the one before; NaN without a training loss.

    A log that writes both only then (S3.43) gives the very point.
    """
    if train is None:
        return np.full(len(val), np.nan)
    stops = np.searchsorted(train.steps, val.steps, side="right")
    starts = np.maximum(np.concatenate(([0], stops[:-1])), stops - NUM_AROUND)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([np.median(train.values[a:b]) if b > a else np.nan for a, b in pairs])


def judged(run: Run) -> Judgement:
    """Raises `NotJudged` without a validation loss."""
    val = run.get("val_loss")
    return judge(val.values, train_losses_at(val, run.find("loss")), run.limits)


def generalisation(run: Run) -> Generalisation | None:
    """None where the run never validated and no external metric is given."""
    val = run.find("val_loss")
    if val is None:
        return None
    judgement = judged(run)
    train = train_losses_at(val, run.find("loss"))
    best = judgement.best
    step, path, reason = _recommended(run, val)
    at = int(np.argmin(np.abs(val.steps - step)))
    return Generalisation(
        best_step=int(val.steps[best]),
        best_loss=float(val.values[best]),
        last_loss=float(val.values[-1]),
        gap=float(val.values[-1] - train[-1]),
        verdicts=dict(zip(val.steps.tolist(), judgement.verdicts, strict=True)),
        overfit_step=None if judgement.overfit is None else int(val.steps[judgement.overfit]),
        recommended_step=step,
        recommended_path=path,
        reason=reason,
        expected_gain=float(val.values[-1] - val.values[at]),
    )


def _recommended(run: Run, val: Series) -> tuple[int, Path | None, str]:
    """(step, path, reason): by the external metric where one is given, else by validation loss."""
    existing = {c.step: c for c in run.log.checkpoints if c.is_complete}
    if run.external:
        return _by_external(run.external, existing)
    losses = dict(zip(val.steps.tolist(), val.values.tolist(), strict=True))
    scored = {step: losses[step] for step in existing if step in losses}
    best = min(losses, key=lambda step: losses[step])
    if not scored:
        none = "no checkpoint is known" if not existing else "no complete checkpoint was validated"
        return best, None, f"Lowest validation loss, {number(losses[best])}; {none}."
    step = min(scored, key=lambda step: scored[step])
    reason = f"Lowest validation loss among the {len(scored)} checkpoints that exist, {number(scored[step])}"
    lost = "" if step == best else f"; the best, {number(losses[best])} at step {best}, was not kept"
    return step, existing[step].path, f"{reason}{lost}."


def _by_external(
    external: Mapping[int, float], existing: Mapping[int, CheckpointState]
) -> tuple[int, Path | None, str]:
    """Higher is better, as for a success rate; it outranks the validation loss."""
    candidates = {step: value for step, value in external.items() if step in existing} or dict(external)
    step = max(candidates, key=lambda step: candidates[step])
    path = existing[step].path if step in existing else None
    return step, path, f"Best external result, {number(candidates[step])}; it outranks the validation loss."
