"""The training loop, from the first step to the exit code.

It runs steps, validations, saves and rollbacks.
"""

import logging
from contextlib import closing

import torch

from trainer.checkpoint.layout import SAVE_TIMEOUT_S
from trainer.data.batch import LossOutput
from trainer.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_RESUMABLE
from trainer.tracking import metrics
from trainer.train.run import Run, is_due
from trainer.train.step import training_step
from trainer.train.validation import Validation

logger = logging.getLogger(__name__)


def fit(run: Run) -> int:
    """Train until the last step, a stop signal or divergence. Return the exit code."""
    with run.stop.deferred():
        while (exit_code := _train(run)) is None:
            logger.info("continuing at step %d", run.batches.step + 1)
        # the durations of the last save and validation are known only after the last row
        step = run.batches.step
        if rest := {**metrics.take_for_row(), **run.checkpoints.take_metrics(step)}:
            run.log(rest, step, kind="end")
    return exit_code


def _train(run: Run) -> int | None:
    """Run steps until the run ends, and return its exit code; None after a rollback."""
    if (exit_code := _settle_debts(run)) is not None:
        return exit_code
    run.heartbeat.enter("train", limit_s=run.hang_timeout_s)
    run.meter.clock.begin()
    with closing(iter(run.batches)) as batches:
        for batch in batches:
            run.heartbeat.step = batch.step
            result = training_step(run, batch)
            row = result.row | metrics.take_for_row()
            decision = result.decision
            run.log(row, batch.step)
            run.meter.clock.mark("logging")
            if decision.rollback_onset is not None and _roll_back(
                run, decision.rollback_onset, decision.reason
            ):
                return None
            if decision.is_stop:
                logger.error("stopped at step %d: %s", batch.step, decision.reason)
                run.checkpoints.finish()
                return EXIT_DIVERGED
            if (exit_code := _end_step(run, batch.step, row)) is not None:
                return exit_code
            run.heartbeat.enter("train", limit_s=run.hang_timeout_s)
    return EXIT_DONE


def _settle_debts(run: Run) -> int | None:
    """Run the validation that was due at the loaded checkpoint, if it was interrupted.

    Returns the exit code if the run ends here, otherwise None.
    """
    step = run.batches.step
    if run.loop.owes_validation:
        validate(run, step)
        if run.loop.owes_validation:
            return _stopped(run, step)
        # the best step may have changed
        run.checkpoints.settle(step, run.guard.history)
    run.loop.has_stopped_early &= run.guard.is_out_of_patience
    if run.loop.has_stopped_early:
        logger.info("the run already ended early, at step %d", step)
        return EXIT_DONE
    return None


def _end_step(run: Run, step: int, row: dict[str, float]) -> int | None:
    """Validate and save if due. Return the exit code if the run ends after this step, or None.

    Validation comes first, so that the checkpoint contains its result, or that it is still due.
    Saves and validations are collective. Their conditions are equal on all ranks: step numbers, and
    flags that a reduction over ranks has set.
    """
    is_last = step >= run.batches.last_step
    if is_last or is_due(run.test_freq, step):
        is_last |= validate(run, step)
    is_ending = run.is_stopping or is_last
    if is_ending or run.is_save_requested or is_due(run.save_freq, step):
        _save(run, row, is_required=is_ending)
    if run.is_stopping and (not is_last or run.loop.owes_validation):
        return _stopped(run, step)
    return EXIT_DONE if is_last else None


def _stopped(run: Run, step: int) -> int:
    reason = run.stop.reason or "a signal"
    logger.info(
        "stopped at step %d by %s and saved; run the same command to continue", step, reason
    )
    return EXIT_RESUMABLE


def _save(run: Run, row: dict[str, float], *, is_required: bool) -> None:
    """Save the state after the step in `row`. `is_required`: True for the run's last save."""
    # the limit covers a save in the background and all attempts of the last save
    run.heartbeat.enter("save", limit_s=4 * SAVE_TIMEOUT_S + run.hang_timeout_s)
    run.checkpoints.save(
        run.batches.position,
        loss=row["train/loss"],
        grad_norm=row["train/grad_norm"],
        history=run.guard.history,
        is_required=is_required,
    )
    run.meter.clock.exclude()


def _roll_back(run: Run, onset: int, reason: str) -> bool:
    """Load the newest good checkpoint well before step `onset`, and skip the batches around that
    step.

    Returns False if there is no such checkpoint. After a crash at any point, the run can continue.
    Collective.
    """
    run.heartbeat.enter("rollback", limit_s=SAVE_TIMEOUT_S + run.hang_timeout_s)
    found = run.checkpoints.decide_rollback(
        run.batches,
        onset=onset,
        history=run.guard.history,
        reason=reason,
    )
    if found is None:
        return False
    target, rollbacks = found
    before = run.guard.state_dict()
    # first, because the loader's state in the checkpoint is only compared with its position
    run.batches.rewind(target.manifest.position, skipped_steps=rollbacks.skipped_steps)
    run.checkpoints.load(target)
    run.guard.after_rollback(before, rollbacks)
    if run.tracking is not None:
        run.tracking.rewind(target.step)
    return True


@torch.no_grad()
def validate(run: Run, step: int) -> bool:
    """Measure and log the token-weighted loss over all validation samples after `step`.

    Returns True if the run ends early. If a stop request interrupts the validation, the next start
    runs it before the first step.
    """
    batches = run.validation_batches
    run.loop.owes_validation = batches is not None
    if batches is None or run.is_stopping:
        return False
    run.heartbeat.enter("validate", limit_s=run.hang_timeout_s)
    run.model.eval()
    validation = Validation(run.world, length_facts=batches.length_facts, sources=batches.sources)
    for batch in batches:
        for micro_batch in batch.micro_batches:
            inputs = micro_batch.to(run.world.device)
            output: LossOutput = run.model(inputs)
            validation.add(inputs, output)
            run.heartbeat.beat()
        run.is_stopping = validation.end_batch(batch, is_stopping=run.stop.is_set)
        if run.is_stopping:
            return False
    run.loop.owes_validation = False
    row = validation.row(train_loss=run.meter.loss_ema)
    is_over = run.guard.observe_validation(step, row["val/loss"], train_loss=run.meter.loss_ema)
    run.loop.has_stopped_early = is_over
    run.log({**row, **run.guard.validation_scores()}, step)
    run.meter.clock.exclude()
    return is_over
