"""The story of a run (floor 3): fit, training_step, validate. The parts arrive ready-made from build/."""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.batch import LossOutput, PackedBatch, StepBatch
from trainer.detection import Limits
from trainer.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_RESUMABLE
from trainer.protocols import Decision, LoopState
from trainer.runtime import seeding
from trainer.runtime.distributed import World
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest

logger = logging.getLogger(__name__)


class Schedule(Protocol):
    def apply(self, optimizer: torch.optim.Optimizer, *, step: int, factor: float) -> float: ...


class Guard(Protocol):
    num_decisions: int
    lr_factor: float

    def limits(self) -> Limits: ...

    def observe(self, step: int, signals: Mapping[str, float], *, is_skipped: bool) -> Decision: ...

    def observe_validation(self, step: int, loss: float, *, train_loss: float) -> Decision: ...

    def scores(self) -> dict[str, float]: ...

    def validation_scores(self) -> dict[str, float]: ...


class Checkpoints(Protocol):
    def save(self, *, loss: float, grad_norm: float, is_required: bool) -> None: ...

    def is_retry_due(self) -> bool: ...

    def finish(self) -> None: ...

    def settle(self) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...

    def roll_back(self, *, onset: int, reason: str) -> bool: ...


class Tracker(Protocol):
    def log(self, data: dict[str, float], step: int, kind: str | None = None) -> None: ...


class TrainBatches(Protocol):
    next_step: int

    def __iter__(self) -> Generator[StepBatch]: ...


class Clock(Protocol):
    def begin(self) -> None: ...
    def mark(self, phase: str) -> float: ...
    def exclude(self) -> float: ...


class StepSums(Protocol):
    @property
    def grad_norm(self) -> Tensor: ...
    @property
    def is_skipped(self) -> Tensor: ...
    def read(self) -> Any: ...


class Meter(Protocol):
    @property
    def clock(self) -> Clock: ...
    @property
    def loss_ema(self) -> float: ...
    def is_rare(self, step: int) -> bool: ...
    @property
    def reduce(self) -> Callable[..., StepSums]: ...
    def signals(self, batch: StepBatch, totals: Any, *, lr: float) -> dict[str, float]: ...
    def row(self, batch: StepBatch, signals: Mapping[str, float], totals: Any) -> dict[str, float]: ...
    def note_duration(self, what: str, seconds: float) -> None: ...
    def take_late(self) -> dict[str, float]: ...


class Validation(Protocol):
    def begin_batch(self) -> None: ...
    def add(self, micro_batch: PackedBatch, output: LossOutput) -> None: ...
    def end_batch(self, batch: StepBatch, *, is_stopping: bool) -> bool: ...
    def row(self, *, train_loss: float) -> dict[str, float]: ...


class Evidence(Protocol):
    def note(self, row: Mapping[str, float]) -> None: ...
    def keep(
        self, batch: StepBatch, losses: Sequence[Tensor], *, signals: Mapping[str, float], is_skipped: bool, reason: str
    ) -> None: ...


class Detail(Protocol):
    def phase(self, infix: str) -> AbstractContextManager[None]: ...
    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Cadence:
    """When things happen, in steps counted from 1; a frequency of -1 means only at the end."""

    total_steps: int
    save_freq: int
    test_freq: int

    def is_save(self, step: int) -> bool:
        return self.save_freq > 0 and step % self.save_freq == 0

    def is_validation(self, step: int) -> bool:
        return self.test_freq > 0 and step % self.test_freq == 0


@dataclass(frozen=True)
class Parts:
    """Everything the loop uses. Functions are collective unless said otherwise."""

    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    guard: Guard
    loop: LoopState
    train_batches: TrainBatches
    validation_batches: Callable[[], Iterable[StepBatch]] | None
    checkpoints: Checkpoints
    tracker: Tracker
    meter: Meter
    new_validation: Callable[[], Validation]
    detail: Detail
    cadence: Cadence
    seed: int
    hang_timeout_s: float
    save_timeout_s: float
    clip_grad: float
    local_square_sum: Callable[[list[nn.Parameter]], Tensor]
    clipped_step: Callable[..., None]
    norm_squares: Callable[..., Tensor]
    evidence: Evidence


class SFTTrainer:
    """Trains until the last step, a stop signal or divergence, and says which by the exit code it returns."""

    def __init__(self, parts: Parts, stop: StopRequest, heartbeat: Heartbeat) -> None:
        self.parts, self.stop, self.heartbeat = parts, stop, heartbeat
        self.parameters = [p for p in parts.model.parameters() if p.requires_grad]
        self._is_stopping = self._is_save_requested = False
        self._norm_squares: Tensor | None = None

    def fit(self) -> int:
        """Run all remaining steps. Step numbers shown and saved count finished optimizer steps, from 1."""
        with self.stop.deferred():
            while (exit_code := self._train()) is None:
                logger.info("going on at step %d", self.parts.train_batches.next_step + 1)
            self._log_rest()
        return exit_code

    def _train(self) -> int | None:
        """Steps until the run ends, with its exit code, or is rolled back (None)."""
        parts, clock = self.parts, self.parts.meter.clock
        clock.begin()
        if (exit_code := self._settle_debts()) is not None:
            return exit_code
        self._begin_step()
        clock.begin()
        with closing(iter(parts.train_batches)) as batches:
            for batch in batches:
                step = self.heartbeat.step = batch.step + 1
                with parts.detail.phase("sft/train_step"):
                    metrics, decision = self.training_step(batch)
                metrics |= parts.detail.take_metrics()
                parts.evidence.note(metrics)
                parts.tracker.log(metrics, step)
                clock.mark("logging")
                if decision.rollback_onset is not None and self._roll_back(decision.rollback_onset, decision.reason):
                    return None
                if decision.is_stop:
                    logger.error("stopped at step %d: %s", step, decision.reason)
                    parts.checkpoints.finish()
                    return EXIT_DIVERGED
                if (exit_code := self._end_step(step, metrics)) is not None:
                    return exit_code
                self._begin_step()
        return EXIT_DONE

    def _settle_debts(self) -> int | None:
        """Make up for a validation that the loaded checkpoint owes; the exit code if the run ends here."""
        parts, step = self.parts, self.parts.train_batches.next_step
        if parts.loop.owes_validation:
            self.validate(step)
            if parts.loop.owes_validation:
                return self._stopped(step)
            parts.checkpoints.settle()  # which step is the best one may have changed
        if parts.loop.has_stopped_early:
            logger.info("this run has ended early, at step %d", step)
            return EXIT_DONE
        return None

    def _end_step(self, step: int, metrics: dict[str, float]) -> int | None:
        """Validate and save where that is due; the exit code if the run ends here."""
        parts = self.parts
        is_last = step >= parts.cadence.total_steps
        if is_last or parts.cadence.is_validation(step):
            is_last |= self.validate(step).is_stop
        is_ending = self._is_stopping or is_last
        if is_ending or self._is_save_requested or parts.cadence.is_save(step):
            self.save(metrics, is_required=is_ending)
        if self._is_stopping and (not is_last or parts.loop.owes_validation):
            return self._stopped(step)
        return EXIT_DONE if is_last else None

    def _stopped(self, step: int) -> int:
        logger.info("stopped at step %d on %s: saved, resumable", step, self.stop.reason or "a signal")
        return EXIT_RESUMABLE

    def _log_rest(self) -> None:
        """What became known after the last row: of the save and the validation that the run ended with."""
        parts = self.parts
        rest = {**parts.meter.take_late(), **parts.detail.take_metrics(), **parts.checkpoints.take_metrics()}
        if rest:
            parts.tracker.log(rest, parts.train_batches.next_step, kind="end")

    def _roll_back(self, onset: int, reason: str) -> bool:
        self.heartbeat.enter("rollback", limit_s=self.parts.save_timeout_s + self.parts.hang_timeout_s)
        is_back = self.parts.checkpoints.roll_back(onset=onset, reason=reason)
        self._norm_squares = None
        return is_back

    def _begin_step(self) -> None:
        self.heartbeat.enter("train", limit_s=self.parts.hang_timeout_s)

    def save(self, metrics: dict[str, float], *, is_required: bool) -> None:
        """Save the state as it is after the step of `metrics`; with `is_required` before the run ends here."""
        # a save in flight, and all tries of one the run ends with
        limit_s = 4 * self.parts.save_timeout_s + self.parts.hang_timeout_s
        self.heartbeat.enter("save", limit_s=limit_s)
        loss, grad_norm = metrics["train/loss"], metrics["train/grad_norm"]
        with self.parts.detail.phase("sft/do_checkpoint"):
            self.parts.checkpoints.save(loss=loss, grad_norm=grad_norm, is_required=is_required)
        self.parts.meter.note_duration("save", self.parts.meter.clock.exclude())

    def training_step(self, batch: StepBatch) -> tuple[dict[str, float], Decision]:
        """Forward and backward over this rank's micro-batches, one reduction, clipped update, one wait; metrics."""
        parts, meter, clock = self.parts, self.parts.meter, self.parts.meter.clock
        data_s = clock.mark("data")
        seeding.seed_step(parts.seed, step=batch.step, rank=parts.world.rank)
        lr = parts.schedule.apply(parts.optimizer, step=batch.step, factor=parts.guard.lr_factor)
        parts.model.train()
        loss_sum, num_nonfinite, losses = self._accumulate(batch)
        sums = meter.reduce(
            batch,
            loss_sum=loss_sum,
            num_nonfinite=num_nonfinite,
            grad_square_sum=parts.local_square_sum(self.parameters),
            norm_squares=self._norm_squares,
            is_stopping=self.stop.is_set,
            wants_save=parts.world.is_main and parts.checkpoints.is_retry_due(),
            limits=parts.guard.limits(),
            num_decisions=parts.guard.num_decisions,
            data_s=data_s,
        )
        parts.clipped_step(
            parts.optimizer, total_norm=sums.grad_norm, is_skipped=sums.is_skipped, max_norm=parts.clip_grad
        )
        parts.optimizer.zero_grad(set_to_none=True)
        # they travel with the next step, which is the one that reports them
        self._norm_squares = parts.norm_squares(parts.optimizer) if meter.is_rare(batch.step + 2) else None
        clock.mark("optimizer")
        totals = sums.read()
        self._is_stopping, self._is_save_requested = totals.num_stop_requests > 0, totals.is_save_requested
        signals = meter.signals(batch, totals, lr=lr)
        clock.mark("other")
        decision = parts.guard.observe(batch.step + 1, signals, is_skipped=totals.is_skipped)
        if decision.wants_evidence:
            parts.evidence.keep(batch, losses, signals=signals, is_skipped=totals.is_skipped, reason=decision.reason)
        clock.mark("guard")
        row = meter.row(batch, signals, totals)
        return {**row, **parts.guard.scores(), **parts.checkpoints.take_metrics()}, decision

    def _accumulate(self, batch: StepBatch) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Gradients of all micro-batches: (summed loss, number with a loss that is not finite, losses of positions)."""
        parts, clock = self.parts, self.parts.meter.clock
        loss_sum = torch.zeros((), dtype=torch.float64, device=parts.world.device)
        num_nonfinite = torch.zeros_like(loss_sum)
        losses: list[Tensor] = []
        for micro_batch in batch.micro_batches:
            inputs = micro_batch.to(parts.world.device)
            clock.mark("h2d")
            output: LossOutput = parts.model(inputs)
            clock.mark("forward")
            (output.loss_sum / batch.num_loss_tokens).backward()
            clock.mark("backward")
            loss_sum += output.loss_sum.detach()
            num_nonfinite += ~output.loss_sum.detach().isfinite()
            losses.append(output.losses_S)
            self.heartbeat.beat()
        return loss_sum, num_nonfinite, losses

    def validate(self, step: int) -> Decision:
        """Token-weighted mean loss over every validation sample; owed when a stop is requested before its end."""
        parts = self.parts
        parts.loop.owes_validation = parts.validation_batches is not None
        if parts.validation_batches is None or self._is_stopping:
            return Decision()
        with parts.detail.phase("sft/eval"):
            metrics = self._validate(parts.validation_batches())
        if metrics is None:
            return Decision()
        parts.loop.owes_validation = False
        decision = parts.guard.observe_validation(step, metrics["val/loss"], train_loss=parts.meter.loss_ema)
        parts.loop.has_stopped_early = decision.is_stop
        parts.tracker.log({**metrics, **parts.guard.validation_scores()}, step)
        parts.meter.note_duration("eval", parts.meter.clock.exclude())
        return decision

    @torch.no_grad()
    def _validate(self, batches: Iterable[StepBatch]) -> dict[str, float] | None:
        """The metrics; None when a stop was requested before the last batch."""
        parts = self.parts
        self.heartbeat.enter("validate", limit_s=parts.hang_timeout_s)
        parts.model.eval()
        validation = parts.new_validation()
        for batch in batches:
            validation.begin_batch()
            for micro_batch in batch.micro_batches:
                inputs = micro_batch.to(parts.world.device)
                validation.add(inputs, parts.model(inputs))
                self.heartbeat.beat()
            self._is_stopping = validation.end_batch(batch, is_stopping=self.stop.is_set)
            if self._is_stopping:
                return None
        return validation.row(train_loss=parts.meter.loss_ema)
