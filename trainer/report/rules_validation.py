"""V16 to V18 and V45: results on held-out samples, the loss against that of training."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.generalisation import RESULTS, generalisation, judged, train_losses_at, val_losses
from trainer.report.judge import Rule, found
from trainer.report.result import Finding
from trainer.report.rules_reward import collapsed
from trainer.report.run_log import Series
from trainer.report.sentence_parts import number, percent
from trainer.report.statistics import longest_run, slope
from trainer.report.validation_verdicts import relative_noise


def _losses(run: AnalysedRun) -> Series:
    val = val_losses(run)
    if len(val) < run.limits["min_evals"]:
        raise NotJudged(f"{len(val)} validations, {int(run.limits['min_evals'])} are needed")
    return val


def lasting_rise(run: AnalysedRun) -> tuple[int, int]:
    """Indices of the first and last validation of the longest rise in a row; equal where it is no more than noise."""
    val = val_losses(run)
    start, stop = longest_run(np.diff(val.values) > 0)
    least = max(run.limits["overfit_note"], run.limits["overfit_note_sigma"] * relative_noise(val.values))
    is_clear = stop - start >= run.limits["val_rises"] and val.values[stop] > (1 + least) * val.values[start]
    return (start, stop) if is_clear else (start, start)


def _rising(run: AnalysedRun) -> Iterator[Finding]:
    val = _losses(run)
    start, stop = lasting_rise(run)
    if num_rises := stop - start:
        is_to_the_end = stop == len(val) - 1
        is_fail = is_to_the_end and num_rises >= run.limits["val_rises_fail"]
        yield found(
            "fail" if is_fail else "warn",
            f"The validation loss rose {num_rises} times in a row, from {number(val.values[start])} to "
            f"{number(val.values[stop])}{', up to the end' if is_to_the_end else ''}.",
            metric=run.name("val_loss"),
            steps=(int(val.steps[start]), int(val.steps[stop])),
            value=float(num_rises),
            threshold=run.limits["val_rises_fail" if is_fail else "val_rises"],
            cause="The model learns its samples by heart, or training has become unstable.",
            remedy=f"Stop training and take {remedies.checkpoint(run, int(val.steps[int(np.argmin(val.values))]))}.",
        )
    run.require_pretrained()
    low, high = run.limits["val_final_low"], run.limits["val_final_high"]
    if run.profile == "sft" and not low <= (last := float(val.values[-1])) <= high:
        yield found(
            "note",
            f"The validation loss ends at {number(last)}; {number(low)} to {number(high)} is usual.",
            metric=run.name("val_loss"),
            steps=(int(val.steps[-1]), int(val.steps[-1])),
            value=last,
            threshold=high if last > high else low,
            suffix="final",
        )


def _overfit(run: AnalysedRun) -> Iterator[Finding]:
    val, train = _losses(run), run.get("loss")
    judgement = judged(run)
    result = generalisation(run)
    if judgement.overfit is None or result is None:
        return
    at = judgement.overfit
    trains = train_losses_at(val, train)
    best_step = int(val.steps[judgement.best])
    kept = [c for c in run.log.checkpoints if c.is_complete]
    is_lost = bool(kept) and result.recommended_step != best_step and not run.external
    verdicts = (f"step {step}: {verdict}" for step, verdict in result.verdicts.items() if verdict != "ok")
    yield found(
        "fail" if is_lost else "warn",
        f"Overfitting from step {val.steps[at]}: validation {number(val.values[at])} against "
        f"{number(result.best_value)} at step {best_step}, while training fell to {number(trains[at])}.",
        metric=run.name("val_loss"),
        steps=(best_step, int(val.steps[-1])),
        value=float(val.values[at] / result.best_value - 1),
        threshold=run.limits["overfit_sure"],
        evidence=(*list(verdicts)[:10], result.reason),
        cause="More passes over the samples than they can teach."
        + (" The checkpoint of the best step no longer exists." if is_lost else ""),
        remedy=f"Use {remedies.checkpoint(run, result.recommended_step or best_step)}; next time stop there, with "
        f"{remedies.option(run, 'epochs')} lower or more data.",
    )


def _disagree(run: AnalysedRun) -> Iterator[Finding]:
    val, train = _losses(run), run.get("loss")
    trains = train_losses_at(val, train)
    last = float(val.values[-1])
    gap = last - float(trains[-1])
    if np.isfinite(gap) and gap > run.limits["gap"] * abs(last) > 0:
        yield found(
            "note",
            f"Validation ({number(last)}) and training loss ({number(trains[-1])}) are {number(gap)} apart, "
            f"{percent(gap / abs(last))} of the validation loss.",
            metric=run.name("val_loss"),
            steps=(int(val.steps[-1]), int(val.steps[-1])),
            value=gap / abs(last),
            threshold=run.limits["gap"],
            cause="Overfitting, or validation samples of another kind than the training samples.",
            remedy="Trust the validation loss; compare samples of both sets.",
        )
    p = run.limits["trend_p"]
    if slope(train).is_falling(p) and slope(val).is_rising(p) and int(np.argmin(val.values)) == 0:
        yield found(
            "note",
            "Validation gets worse from the first evaluation on, while the training loss falls.",
            metric=run.name("val_loss"),
            steps=steps_of(val, 0, len(val)),
            cause="The validation set is of another kind, or the learning rate destroys what the model knew.",
            remedy=f"Compare samples of both sets. {remedies.lower_rate(run)}",
            suffix="opposite",
        )


def _results(run: AnalysedRun) -> Iterator[Finding]:
    roles = [role for role in RESULTS if run.find(role) is not None]
    if not roles:
        raise NotJudged("the log has no reward or accuracy on held-out samples")
    for role in roles:
        yield from collapsed(run, role)


RULES = (
    Rule("V16", "val_rising", _rising, ("val_loss",)),
    Rule("V17", "overfit", _overfit, ("val_loss", "loss")),
    Rule("V18", "val_train_disagree", _disagree, ("val_loss", "loss")),
    Rule("V45", "val_results", _results),
)
