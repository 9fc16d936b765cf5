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


class LossSums(NamedTuple):
    """Of this rank's micro-batches, on the device."""

    loss_sum: Tensor
    """Cross-entropy of the supervised tokens, float64 scalar."""
    objective_sum: Tensor | None
    """The same of the trained loss; None where that is cross-entropy."""
    num_hits: Tensor
    """Supervised tokens that no other was likelier than, float64."""
    num_nonfinite: Tensor
    """Micro-batches whose loss is not finite."""
    by_source: Tensor
    """Float64 [sources]; empty where there is but one."""
    losses: list[Tensor]
    """Per micro-batch the loss of each supervised position."""

    @property
    def trained(self) -> str:
        """Name of the sum whose gradient is taken."""
        return "loss_sum" if self.objective_sum is None else "objective_sum"

    def by_name(self, batch: StepBatch) -> dict[str, Tensor]:
        """What ranks add up."""
        by_source = zip(batch.loss_tokens_by, self.by_source.unbind(), strict=True)
        named = {loss_key(name): value for name, value in by_source}
        if self.objective_sum is not None:
            named["objective_sum"] = self.objective_sum
        return {"loss_sum": self.loss_sum, "num_hits": self.num_hits, **named}


def training_step(run: Run, batch: StepBatch) -> StepResult:
    """Make step `batch.step`. Between the batch and the one wait at its end everything is
    asynchronous.
    """
    clock = run.meter.clock
    clock.mark("data")
    seeding.seed_step(run.seed, step=batch.step, rank=run.world.rank)
    lr = run.lr_schedule.apply(run.optimizer, step=batch.step, factor=run.guard.lr_factor)
    run.model.train()
    loss = accumulate(run, batch)
    router_sums, expert_tokens = run.routers.take()
    packet = reduce_packet(
        run.world,
        sums={
            **loss.by_name(batch),
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
        | ~packet.sum_of(loss.trained).isfinite()
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
            batch, loss.losses, signals=signals, is_skipped=was_skipped, reason=decision.reason
        )
    clock.mark("guard")
    row = run.meter.row(batch, signals, totals)
    return StepResult(
        {**row, **run.guard.scores(), **run.checkpoints.take_metrics(batch.step)}, decision
    )


def accumulate(run: Run, batch: StepBatch) -> LossSums:
    """Add up the gradients of this rank's micro-batches, of the mean loss over the whole global
    batch.
    """
    clock, device = run.meter.clock, run.world.device
    loss_sum, objective_sum, num_hits, num_nonfinite = torch.zeros(
        4, dtype=torch.float64, device=device
    ).unbind()
    by_source = torch.zeros(len(batch.loss_tokens_by), dtype=torch.float64, device=device)
    objective = None if run.model.trains_cross_entropy else objective_sum
    sums = LossSums(loss_sum, objective, num_hits, num_nonfinite, by_source, [])
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
        if sums.objective_sum is None:
            sums.loss_sum.add_(trained_sum)
        else:
            sums.objective_sum.add_(trained_sum)
            sums.loss_sum.add_(output.losses_S.sum(dtype=torch.float64))
        sums.num_hits.add_(output.hits_S.sum())
        sums.num_nonfinite.add_(~trained_sum.isfinite())
        if batch.loss_tokens_by:
            by_source.index_add_(0, inputs.sources_D, document_sums(inputs, output.losses_S)[0])
        sums.losses.append(output.losses_S)
        run.heartbeat.beat()
    metrics.put("train/nonfinite", num_nonfinite)
    if num_own := sum(micro_batch.num_loss_tokens for micro_batch in batch.micro_batches):
        metrics.put("train/loss_max_rank", loss_sum / num_own)
    return sums


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
