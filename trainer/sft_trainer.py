"""The story of a run (floor 3): fit, training_step, validation_step. The parts arrive ready-made from build.py."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.batch import StepBatch
from trainer.protocols import EXIT_DIVERGED, EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime import seeding
from trainer.runtime.distributed import World
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest

logger = logging.getLogger(__name__)


class Schedule(Protocol):
    def apply(self, optimizer: torch.optim.Optimizer, *, step: int) -> float: ...


class Guard(Protocol):
    num_skipped: int

    def count(self, *, loss: float, grad_norm: float) -> None: ...

    @property
    def is_exhausted(self) -> bool: ...


class Checkpoints(Protocol):
    def save(self, *, loss: float, grad_norm: float, is_required: bool) -> None: ...

    def is_retry_due(self) -> bool: ...

    def finish(self) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...


class Tracker(Protocol):
    def log(self, data: dict[str, float], step: int) -> None: ...


class TrainBatches(Protocol):
    next_step: int

    def __iter__(self) -> Iterator[StepBatch]: ...


class StepTotals(Protocol):
    @property
    def loss_sum(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def num_stop_requests(self) -> int: ...
    @property
    def is_save_requested(self) -> bool: ...


class StepSums(Protocol):
    @property
    def loss_sum(self) -> Tensor: ...
    @property
    def grad_norm(self) -> Tensor: ...
    def read(self) -> StepTotals: ...


@dataclass(frozen=True)
class Cadence:
    """When things happen, in steps counted from 1; a frequency of -1 means only at the end."""

    total_steps: int
    save_freq: int
    test_freq: int

    def is_last(self, step: int) -> bool:
        return step >= self.total_steps

    def is_save(self, step: int) -> bool:
        return self.is_last(step) or (self.save_freq > 0 and step % self.save_freq == 0)

    def is_validation(self, step: int) -> bool:
        return self.is_last(step) or (self.test_freq > 0 and step % self.test_freq == 0)


@dataclass
class LoopState:
    """What the loop itself remembers over a restart."""

    owes_validation: bool = False
    """A stop request cut the validation of the saved step short: it is made up for before the next step."""

    def state_dict(self) -> dict[str, Any]:
        return {"owes_validation": self.owes_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owes_validation = bool(state_dict["owes_validation"])


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
    cadence: Cadence
    seed: int
    hang_timeout_s: float
    save_timeout_s: float
    clip_grad: float
    local_square_sum: Callable[[list[nn.Parameter]], Tensor]
    clipped_step: Callable[..., None]
    reduce_step: Callable[..., StepSums]
    reduce_loss: Callable[..., tuple[float, bool]]
    memory_metrics: Callable[[torch.device], dict[str, float]]


class SFTTrainer:
    """Trains until the last step, a stop signal or divergence, and says which by the exit code it returns."""

    def __init__(self, parts: Parts, stop: StopRequest, heartbeat: Heartbeat) -> None:
        self.parts, self.stop, self.heartbeat = parts, stop, heartbeat
        self.parameters = [p for p in parts.model.parameters() if p.requires_grad]
        self._step_started = time.perf_counter()
        self._is_stopping = self._is_save_requested = False

    def fit(self) -> int:
        """Run all remaining steps. Step numbers shown and saved count finished optimizer steps, from 1."""
        parts = self.parts
        with self.stop.deferred():
            if parts.loop.owes_validation:
                self.validate(parts.train_batches.next_step)
            self._begin_step()
            for batch in parts.train_batches:
                step = batch.step + 1
                metrics = self.training_step(batch)
                parts.tracker.log(metrics, step)
                if parts.guard.is_exhausted:
                    logger.error("stopped at step %d: too many steps in a row without a finite loss and gradient", step)
                    parts.checkpoints.finish()
                    return EXIT_DIVERGED
                if not self._is_stopping and parts.cadence.is_validation(step):
                    self.validate(step)
                is_ending = self._is_stopping or parts.cadence.is_last(step)
                if is_ending or self._is_save_requested or parts.cadence.is_save(step):
                    self.save(metrics, is_required=is_ending)
                if self._is_stopping and not parts.cadence.is_last(step):
                    logger.info("stopped at step %d on %s: saved, resumable", step, self.stop.reason or "a signal")
                    return EXIT_RESUMABLE
                self._begin_step()
        return EXIT_DONE

    def _begin_step(self) -> None:
        self._step_started = time.perf_counter()
        self.heartbeat.enter("train", limit_s=self.parts.hang_timeout_s)

    def save(self, metrics: dict[str, float], *, is_required: bool) -> None:
        """Save the state as it is after the step of `metrics`; with `is_required` before the run ends here."""
        # a save in flight, and all tries of one the run ends with
        limit_s = 4 * self.parts.save_timeout_s + self.parts.hang_timeout_s
        self.heartbeat.enter("save", limit_s=limit_s)
        loss, grad_norm = metrics["train/loss"], metrics["train/grad_norm"]
        self.parts.checkpoints.save(loss=loss, grad_norm=grad_norm, is_required=is_required)

    def training_step(self, batch: StepBatch) -> dict[str, float]:
        """Forward and backward over this rank's micro-batches, one reduction, clipped update, one wait; metrics."""
        parts = self.parts
        data_s = time.perf_counter() - self._step_started
        seeding.seed_step(parts.seed, step=batch.step, rank=parts.world.rank)
        lr = parts.schedule.apply(parts.optimizer, step=batch.step)
        parts.model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=parts.world.device)
        for micro_batch in batch.micro_batches:
            micro_loss_sum = parts.model(micro_batch.to(parts.world.device))
            (micro_loss_sum / batch.num_loss_tokens).backward()
            loss_sum += micro_loss_sum.detach()
            self.heartbeat.beat()
        sums = parts.reduce_step(
            loss_sum=loss_sum,
            grad_square_sum=parts.local_square_sum(self.parameters),
            is_stopping=self.stop.is_set,
            wants_save=parts.world.is_main and parts.checkpoints.is_retry_due(),
            world=parts.world,
        )
        parts.clipped_step(parts.optimizer, total_norm=sums.grad_norm, loss_sum=sums.loss_sum, max_norm=parts.clip_grad)
        parts.optimizer.zero_grad(set_to_none=True)
        totals = sums.read()
        loss = totals.loss_sum / batch.num_loss_tokens
        parts.guard.count(loss=loss, grad_norm=totals.grad_norm)
        self._is_stopping, self._is_save_requested = totals.num_stop_requests > 0, totals.is_save_requested
        return self._metrics(batch, loss=loss, lr=lr, grad_norm=totals.grad_norm, data_s=data_s)

    def _metrics(
        self, batch: StepBatch, *, loss: float, lr: float, grad_norm: float, data_s: float
    ) -> dict[str, float]:
        step_s = time.perf_counter() - self._step_started
        return {
            "train/loss": loss,
            "train/lr(1e-3)": lr * 1e3,
            "train/grad_norm": grad_norm,
            "train/time(s)": step_s,
            "time/train/data_s": data_s,
            "throughput/train/tokens_per_s": batch.num_tokens / step_s,
            "throughput/train/valid_tokens_per_s": batch.num_loss_tokens / step_s,
            "train/total_token_count": batch.num_tokens,
            "train/total_valid_token_count": batch.num_loss_tokens,
            "optim/skipped_steps": self.parts.guard.num_skipped,
            "progress/epoch": batch.epoch,
            **self.parts.memory_metrics(self.parts.world.device),
            **self.parts.checkpoints.take_metrics(),
        }

    def validate(self, step: int) -> None:
        """Token-weighted mean loss over every validation sample; put off when a stop is requested meanwhile."""
        if self.parts.validation_batches is None:
            return
        started = time.perf_counter()
        self.heartbeat.enter("validate", limit_s=self.parts.hang_timeout_s)
        self.parts.model.eval()
        loss_sum, num_loss_tokens, num_samples = 0.0, 0, 0
        for batch in self.parts.validation_batches():
            batch_loss_sum, self._is_stopping = self.validation_step(batch)
            if self._is_stopping:
                self.parts.loop.owes_validation = True
                return
            loss_sum += batch_loss_sum
            num_loss_tokens += batch.num_loss_tokens
            num_samples += batch.num_samples
        metrics: dict[str, Any] = {
            "val/loss": loss_sum / num_loss_tokens,
            "val/samples": num_samples,
            "val/total_valid_token_count": num_loss_tokens,
            "time/eval/total_s": time.perf_counter() - started,
        }
        self.parts.loop.owes_validation = False
        self.parts.tracker.log(metrics, step)

    @torch.no_grad()
    def validation_step(self, batch: StepBatch) -> tuple[float, bool]:
        """(summed cross-entropy of one batch over all ranks, whether any rank was asked to stop)."""
        device = self.parts.world.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in batch.micro_batches:
            loss_sum += self.parts.model(micro_batch.to(device))
            self.heartbeat.beat()
        return self.parts.reduce_loss(loss_sum, is_stopping=self.stop.is_set)
