"""One optimizer step.

Its stages: forward and backward passes, one reduction, the gradient norm, the decision to skip the
update, the clipped update, and one wait for the device.
"""

import torch
from torch import Tensor

from trainer.data.batch import LossOutput, StepBatch
from trainer.model import parallelize
from trainer.optim.clip import clipped_step, local_square_sum
from trainer.runtime import seeding
from trainer.tracking import metrics
from trainer.train.detection import StepLimits
from trainer.train.packet import Value, reduce_packet
from trainer.train.parts import StepResult
from trainer.train.run import Run


def training_step(run: Run, batch: StepBatch) -> StepResult:
    """Run step `batch.step`.

    Everything between the arrival of the batch and the single wait at the end is asynchronous.
    """
    clock = run.meter.clock
    parts = run.parts.values()
    clock.mark("data")
    seeding.seed_step(run.seed, step=batch.step, rank=run.world.rank)
    lr = run.lr_schedule.apply(run.optimizer, step=batch.step, factor=run.guard.rollbacks.lr_factor)
    run.model.train()
    trained, losses = accumulate(run, batch)
    # The last backward pass left the gradient summed over ranks in shards, so the squares of all
    # shards add up to the global norm. Each shard exists once in every replica.
    sums: dict[str, Value] = {
        **losses,
        "grad_square_sum": local_square_sum(run.parameters) / run.world.num_replicas,
        "num_stop_requests": run.stop.is_set,
        "num_save_requests": run.world.is_main and run.checkpoints.is_save_due(),
    }
    by_rank: dict[str, Value] = {}
    for part in parts:
        sums |= part.sums(batch)
        by_rank |= part.by_rank()
    packet = reduce_packet(run.world, sums=sums, by_rank=by_rank)

    mean_loss = packet.sums["loss_sum"] / batch.num_loss_tokens
    grad_norm = packet.sums["grad_square_sum"].sqrt()
    is_skipped = is_left_out(mean_loss, grad_norm, run.guard.limits())
    # `loss_sum` is always cross-entropy, which may be finite although the training loss is not
    is_skipped |= ~packet.sums[trained].isfinite()
    run.checkpoints.before_update()
    clipped_step(
        run.optimizer,
        total_norm=grad_norm,
        is_skipped=is_skipped,
        max_norm=run.max_norm,
        rounding_key=seeding.key("rounding", run.seed, batch.step),
    )
    run.optimizer.zero_grad(set_to_none=True)
    derived = {"grad_norm": grad_norm, "is_skipped": is_skipped}
    for part in parts:
        derived |= part.after_update(batch, packet)
    clock.mark("optimizer")

    step = StepResult(batch, packet.read(**derived), lr)
    run.is_stopping = step.totals.sums["num_stop_requests"] > 0
    run.is_save_requested = step.totals.sums["num_save_requests"] > 0
    for part in parts:
        step.signals |= part.signals(step)
    clock.mark("other")
    for part in parts:
        part.after_step(step)
    step.row |= run.checkpoints.take_metrics(batch.step)
    return step


def accumulate(run: Run, batch: StepBatch) -> tuple[str, dict[str, Tensor]]:
    """Accumulate this rank's gradients of the mean loss over the whole global batch.

    Returns the name of the sum that is differentiated, and this rank's sums, in float64 on the
    device: the cross-entropy of the supervised tokens (`loss_sum`), the number of those tokens that
    the model finds most likely (`num_hits`), and the training loss.
    """
    clock = run.meter.clock
    device = run.world.device
    trained = "loss_sum" if run.model.trains_cross_entropy else "objective_sum"
    names = dict.fromkeys(("loss_sum", "num_hits", trained, "num_nonfinite"))
    zeros = torch.zeros(len(names), dtype=torch.float64, device=device)
    sums = dict(zip(names, zeros.unbind(), strict=True))
    for index, micro_batch in enumerate(batch.micro_batches):
        parallelize.prepare_backward(run.model, is_last=index == len(batch.micro_batches) - 1)
        inputs = micro_batch.to(device)
        clock.mark("shard")
        output: LossOutput = run.model(inputs)
        clock.mark("forward")
        loss = output.loss_sum / batch.num_loss_tokens
        for part in run.parts.values():
            term = part.after_micro_batch(batch, inputs, output)
            loss = loss if term is None else loss + term
        loss.backward()
        clock.mark("backward")
        trained_sum = output.loss_sum.detach()
        sums[trained].add_(trained_sum)
        if trained != "loss_sum":
            sums["loss_sum"].add_(output.losses_S.sum(dtype=torch.float64))
        sums["num_hits"].add_(output.hits_S.sum())
        sums["num_nonfinite"].add_(~trained_sum.isfinite())
        run.heartbeat.beat()
    metrics.put("train/nonfinite", sums.pop("num_nonfinite"))
    if num_own := sum(micro_batch.num_loss_tokens for micro_batch in batch.micro_batches):
        metrics.put("train/loss_max_rank", sums["loss_sum"] / num_own)
    return trained, sums


def is_left_out(loss: Tensor, grad_norm: Tensor, limits: StepLimits) -> Tensor:
    """Return a boolean scalar on the device: True if the step's update must be skipped.

    That is the case if the loss or the norm is not finite, or beyond the limits of this step.
    """
    is_finite = loss.isfinite() & grad_norm.isfinite()
    is_severe: Tensor = limits.are_exceeded(loss, grad_norm)
    return ~is_finite | is_severe
