"""One optimizer step (floor 3): forward, backward, one reduction, norm, decision to skip,
clipped update, one wait.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer import metrics
from trainer.batch import LossOutput, StepBatch, document_sums
from trainer.detection import StepLimits
from trainer.guard.guard import Decision
from trainer.loop.run import Run
from trainer.model import parallelize
from trainer.monitor.meter import BLOCK_SQUARES, PARAM_SQUARES
from trainer.monitor.packet import loss_key, reduce_packet
from trainer.optim.clip import clipped_step, local_square_sum, square_sum
from trainer.runtime import seeding


class StepResult(NamedTuple):
    row: dict[str, float]
    """The metrics."""
    decision: Decision


class Losses(NamedTuple):
    """Of this rank's micro-batches, on the device."""

    sums: dict[str, Tensor]
    """What ranks add up, float64: cross-entropy of the supervised tokens (`loss_sum`, and by source
    where there are several), tokens that no other was likelier than (`num_hits`), and the trained
    loss."""
    trained: str
    """Name of the sum whose gradient is taken."""
    by_position: list[Tensor]
    """Per micro-batch the cross-entropy of each supervised position."""


def training_step(run: Run, batch: StepBatch) -> StepResult:
    """Make step `batch.step`. Between the batch and the one wait at its end everything is
    asynchronous.
    """
    clock = run.meter.clock
    clock.mark("data")
    seeding.seed_step(run.seed, step=batch.step, rank=run.world.rank)
    lr = run.lr_schedule.apply(run.optimizer, step=batch.step, factor=run.guard.lr_factor)
    run.model.train()
    losses = accumulate(run, batch)
    router_sums, expert_tokens = run.routers.take()
    packet = reduce_packet(
        run.world,
        sums={
            **losses.sums,
            **router_sums,
            "grad_square_sum": local_square_sum(run.parameters) / run.world.num_replicas,
            **(rare_square_sums(run) if run.meter.is_rare(batch.step) else {}),
            "num_stop_requests": run.stop.is_set,
            "num_save_requests": run.world.is_main and run.checkpoints.is_retry_due(),
        },
        by_rank={"decisions": run.guard.num_decisions, **run.meter.measured()},
        vector=expert_tokens,
    )
    mean_loss = packet.sum_of("loss_sum") / batch.num_loss_tokens
    grad_norm = packet.sum_of("grad_square_sum").sqrt()
    is_skipped = (
        is_left_out(mean_loss, grad_norm, run.guard.limits())
        | ~packet.sum_of(losses.trained).isfinite()
    )
    run.checkpoints.before_update()
    clipped_step(
        run.optimizer,
        total_norm=grad_norm,
        is_skipped=is_skipped,
        max_norm=run.max_norm,
        rounding_key=seeding.key("rounding", run.seed, batch.step),
    )
    run.optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    totals = packet.read(
        grad_norm=grad_norm, is_skipped=is_skipped, **run.routers.settle(packet.vector, batch)
    )
    run.is_stopping, run.is_save_requested = (
        totals.sums[f"num_{what}_requests"] > 0 for what in ("stop", "save")
    )
    was_skipped = bool(totals.sums["is_skipped"])
    signals = run.meter.signals(batch, totals, lr=lr)
    clock.mark("other")
    decision = run.guard.observe(batch.step, signals, is_skipped=was_skipped)
    if decision.wants_evidence:
        run.evidence.keep(
            batch,
            losses.by_position,
            signals=signals,
            is_skipped=was_skipped,
            reason=decision.reason,
        )
    clock.mark("guard")
    row = run.meter.row(batch, signals, totals)
    return StepResult(
        {**row, **run.guard.scores(), **run.checkpoints.take_metrics(batch.step)}, decision
    )


def accumulate(run: Run, batch: StepBatch) -> Losses:
    """Add up the gradients of this rank's micro-batches, of the mean loss over the whole global
    batch.
    """
    clock, device = run.meter.clock, run.world.device
    trained = "loss_sum" if run.model.trains_cross_entropy else "objective_sum"
    names = dict.fromkeys(("loss_sum", "num_hits", trained, "num_nonfinite"))
    zeros = torch.zeros(len(names), dtype=torch.float64, device=device)
    sums = dict(zip(names, zeros.unbind(), strict=True))
    by_source = torch.zeros(len(batch.loss_tokens_by), dtype=torch.float64, device=device)
    by_position = []
    for index, micro_batch in enumerate(batch.micro_batches):
        parallelize.prepare_backward(run.model, is_last=index == len(batch.micro_batches) - 1)
        inputs = micro_batch.to(device)
        clock.mark("shard")
        output: LossOutput = run.model(inputs)
        clock.mark("forward")
        router_loss = run.routers.add(inputs, batch.num_tokens)
        (output.loss_sum / batch.num_loss_tokens + router_loss).backward()
        clock.mark("backward")
        trained_sum = output.loss_sum.detach()
        sums[trained].add_(trained_sum)
        if trained != "loss_sum":
            sums["loss_sum"].add_(output.losses_S.sum(dtype=torch.float64))
        sums["num_hits"].add_(output.hits_S.sum())
        sums["num_nonfinite"].add_(~trained_sum.isfinite())
        if batch.loss_tokens_by:
            by_source.index_add_(0, inputs.sources_D, document_sums(inputs, output.losses_S)[0])
        by_position.append(output.losses_S)
        run.heartbeat.beat()
    metrics.put("train/nonfinite", sums.pop("num_nonfinite"))
    if num_own := sum(micro_batch.num_loss_tokens for micro_batch in batch.micro_batches):
        metrics.put("train/loss_max_rank", sums["loss_sum"] / num_own)
    for name, value in zip(batch.loss_tokens_by, by_source.unbind(), strict=True):
        sums[loss_key(name)] = value
    return Losses(sums, trained, by_position)


def rare_square_sums(run: Run) -> dict[str, Tensor]:
    """Squared norms of this rank's share of the parameters, and of the gradient of each block:
    float64 scalars.
    """
    squares = {PARAM_SQUARES: square_sum(run.parameters)}
    for name, parameters in run.blocks.items():
        squares[f"{BLOCK_SQUARES}{name}"] = local_square_sum(parameters)
    return {name: square / run.world.num_replicas for name, square in squares.items()}


def is_left_out(loss: Tensor, grad_norm: Tensor, limits: StepLimits) -> Tensor:
    """Boolean scalar on the device: loss or norm is not finite, or beyond the limits of this
    step.
    """
    is_finite = loss.isfinite() & grad_norm.isfinite()
    is_severe = (loss > limits.loss_with_grad) & (grad_norm > limits.grad_with_loss)
    return ~is_finite | is_severe | (loss > limits.loss_alone) | (grad_norm > limits.grad_alone)
