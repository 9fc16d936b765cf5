"""The validation loss, token-weighted over every validation sample (floor 3)."""

import torch

from trainer.batch import LossOutput
from trainer.data.loader import ValidationBatches
from trainer.guard.guard import Decision
from trainer.loop.run import Run
from trainer.monitor.validation import Validation


def validate(run: Run, step: int) -> Decision:
    """Measure, log and judge the model as it is after `step`; owed when a stop is requested before the end."""
    run.loop.owes_validation = run.validation_batches is not None
    if run.validation_batches is None or run.is_stopping:
        return Decision()
    with run.detail.phase("sft/eval"):
        metrics = _measure(run, run.validation_batches)
    if metrics is None:
        return Decision()
    run.loop.owes_validation = False
    decision = run.guard.observe_validation(step, metrics["val/loss"], train_loss=run.meter.loss_ema)
    run.loop.has_stopped_early = decision.is_stop
    run.log({**metrics, **run.guard.validation_scores()}, step)
    run.meter.note_duration("eval", run.meter.clock.exclude())
    return decision


@torch.no_grad()
def _measure(run: Run, batches: ValidationBatches) -> dict[str, float] | None:
    """The metrics; None when a stop was requested before the last batch."""
    run.heartbeat.enter("validate", limit_s=run.hang_timeout_s)
    run.model.eval()
    validation = Validation(run.world, length_facts=batches.length_facts, sources=batches.sources)
    for batch in batches:
        validation.begin_batch()
        for micro_batch in batch.micro_batches:
            inputs = micro_batch.to(run.world.device)
            output: LossOutput = run.model(inputs)
            validation.add(inputs, output)
            run.heartbeat.beat()
        run.is_stopping = validation.end_batch(batch, is_stopping=run.stop.is_set)
        if run.is_stopping:
            return None
    return validation.row(train_loss=run.meter.loss_ema)
