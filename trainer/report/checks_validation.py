"""What is measured of the loss on held-out samples, by itself and against that of training."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.generalisation import generalisation, relative_noise, train_losses_at, val_losses
from trainer.report.measure import Measure
from trainer.report.run_log import Series
from trainer.report.statistics import longest_run, slope


def _losses(run: AnalysedRun) -> Series:
    val = val_losses(run)
    if len(val) < run.limits["min_evals"]:
        raise NotJudged(f"{len(val)} validations, {int(run.limits['min_evals'])} are needed")
    return val


def validation_rises(run: AnalysedRun) -> Iterator[Measure]:
    """The longest rise in a row where it is more than noise, and the last loss."""
    val, limits = _losses(run), run.limits
    start, stop = longest_run(np.diff(val.values) > 0)
    rises, is_to_the_end = stop - start, stop == len(val) - 1
    before, after = float(val.values[start]), float(val.values[stop])
    least = max(limits["overfit_note"], limits["overfit_note_sigma"] * relative_noise(val.values))
    best = remedies.checkpoint(run, int(val.steps[int(np.argmin(val.values))]))
    words = {"rises": rises, "before": before, "after": after, "checkpoint": best}
    words["end"] = ", up to the end" if is_to_the_end else ""
    is_lasting = is_to_the_end and rises >= limits["val_rises_fail"]
    yield Measure(
        "lasting" if is_lasting else "main",
        float(rises),
        (int(val.steps[start]), int(val.steps[stop])),
        words,
        is_fault=rises >= limits["val_rises"] and after > (1 + least) * before,
    )
    run.require_pretrained()
    last, low, high = float(val.values[-1]), limits["val_final_low"], limits["val_final_high"]
    if run.profile == "sft" and not low <= last <= high:
        steps = int(val.steps[-1]), int(val.steps[-1])
        yield Measure("final", last, steps, limit=high if last > high else low)


def overfitting(run: AnalysedRun) -> Iterator[Measure]:
    val, told = _losses(run), generalisation(run)
    if told is None or told.overfit_step is None:
        return
    at, loss = told.overfit_step, told.values[told.overfit_step]
    trained = train_losses_at(val, run.get("loss"))[int(np.searchsorted(val.steps, at))]
    kept = any(state.is_complete for state in run.log.checkpoints)
    is_lost = kept and told.recommended_step != told.best_step and not run.external
    good = remedies.checkpoint(run, told.recommended_step or told.best_step)
    words = {"at": at, "loss": loss, "best": told.best_value, "best_step": told.best_step, "train": trained}
    verdicts = [f"step {step}: {verdict}" for step, verdict in told.verdicts.items() if verdict != "ok"][:10]
    rise, steps = loss / told.best_value - 1, (told.best_step, int(val.steps[-1]))
    evidence = (*verdicts, told.reason)
    yield Measure("lost" if is_lost else "main", rise, steps, {**words, "checkpoint": good}, evidence)


def disagreement(run: AnalysedRun) -> Iterator[Measure]:
    """How far validation and training loss are apart, and whether they part from the start."""
    val, train = _losses(run), run.get("loss")
    last, trained = float(val.values[-1]), float(train_losses_at(val, train)[-1])
    gap = last - trained
    if np.isfinite(gap) and gap > run.limits["gap"] * abs(last) > 0:
        words = {"val": last, "train": trained, "apart": gap}
        yield Measure(value=gap / abs(last), steps=(int(val.steps[-1]), int(val.steps[-1])), words=words)
    p = run.limits["trend_p"]
    if slope(train).is_falling(p) and slope(val).is_rising(p) and int(np.argmin(val.values)) == 0:
        yield Measure("opposite", steps=steps_of(val, 0, len(val)))
