"""Builds the planned batches with torchdata's `StatefulDataLoader`, one item per optimizer step.

The step number alone determines a run's position in the data. Checkpoints also store torchdata's
state, for tools that read it.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Iterator, Mapping
from multiprocessing import context, popen_fork
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.data.batch import IGNORE_INDEX, PackedBatch, StepBatch
from trainer.data.batch_plan import RankPlan, Schedule, deal_facts, length_facts
from trainer.data.samples import Samples
from trainer.errors import EXIT_RESUMABLE, CannotWriteError
from trainer.runtime.progress import Position
from trainer.runtime.signals import become_worker

logger = logging.getLogger(__name__)


def pack(samples: Samples, indices: list[int]) -> PackedBatch:
    """Lay samples end to end, and shift the labels within each sample. Without samples, return a
    batch of one padding token without a label.
    """
    padding = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=bool)
    parts = [samples.sample(index) for index in indices] or [padding]
    ids_T = np.concatenate([ids for ids, _ in parts]).astype(np.int64)
    mask_T = np.concatenate([mask for _, mask in parts])
    seqlens = tuple(len(ids) for ids, _ in parts)
    mask_T[np.cumsum(seqlens)[:-1]] = False  # nothing predicts the first token of a document
    has_label_T = np.append(mask_T[1:], False)
    labels_T = np.where(has_label_T, np.roll(ids_T, -1), IGNORE_INDEX)
    return PackedBatch.of(
        torch.from_numpy(ids_T),
        torch.from_numpy(labels_T),
        seqlens=seqlens,
        sample_ids=tuple(indices),
        sources_D=torch.from_numpy(samples.source_of(indices or [0])),
    )


def build_step(
    samples: Samples,
    ids: np.ndarray,
    plan: RankPlan,
    *,
    step: int,
    epoch: int,
) -> StepBatch:
    """Return this rank's part of the global batch `ids` (sample ids, int64)."""
    lengths, num_loss_tokens = samples.counts(ids)
    dealt = plan.deal(lengths)
    micro_batches = tuple(
        pack(samples, [int(ids[i]) for i in members]).share(*plan.share)
        for members in dealt[plan.data_rank]
    )
    return StepBatch(
        step=step,
        epoch=epoch,
        micro_batches=micro_batches,
        num_loss_tokens=int(num_loss_tokens.sum()),
        num_tokens=int(lengths.sum()),
        num_samples=len(ids),
        lengths=tuple(int(length) for length in lengths),
        sample_ids=tuple(int(i) for i in ids),
        loss_tokens_by=_by_source(samples, ids, num_loss_tokens),
        length_facts=length_facts(lengths, num_loss_tokens),
        deal_facts=deal_facts(lengths, num_loss_tokens, dealt, plan.limits),
    )


def _by_source(samples: Samples, ids: np.ndarray, num_loss_tokens: np.ndarray) -> dict[str, int]:
    if len(samples.names) == 1:
        return {}
    sources = samples.source_of(ids)
    return {
        name: int(num_loss_tokens[sources == number].sum())
        for number, name in enumerate(samples.names)
    }


class _StepDataset(Dataset[StepBatch]):
    def __init__(
        self,
        samples: Samples,
        plan: RankPlan,
        schedule: Schedule,
    ) -> None:
        self.samples = samples
        self.plan = plan
        self.schedule = schedule

    def __getitem__(self, step: int) -> StepBatch:
        # reading past the end of a truncated file would kill this process
        self.samples.require_unchanged()
        epoch = self.schedule.position(step - 1).epoch
        ids = self.samples.of_rows(self.schedule.rows(step))
        return build_step(self.samples, ids, self.plan, step=step, epoch=epoch)


class _WorkerHandle(popen_fork.Popen):
    def terminate(self) -> None:
        # workers ignore SIGTERM, and an exiting process waits until terminated workers have ended
        self.kill()


class _Worker(context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _WorkerHandle:  # noqa: N802  a name of multiprocessing
        return _WorkerHandle(process_obj)


class _WorkerContext(context.ForkContext):
    Process = _Worker


def _prepare_worker(worker_id: int) -> None:
    become_worker(os.getppid(), code=EXIT_RESUMABLE)
    torch.set_num_threads(1)


class TrainLoader:
    """Yields the batches of the steps after `schedule.start`, up to and including `total_steps`. A
    run can resume after any step, on any number of ranks.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        plan: RankPlan,
        schedule: Schedule,
        total_steps: int,
        num_workers: int,
        skipped_steps: frozenset[int] = frozenset(),
    ) -> None:
        """Batches of `skipped_steps` are not used for training."""
        self._samples = samples
        self.plan = plan
        self.schedule = schedule
        self._num_workers = num_workers
        self._skipped_steps = skipped_steps
        self.last_step = total_steps
        self.step = schedule.start.step
        """The last yielded step; once it has been trained, also the number of finished steps."""
        self._loader: StatefulDataLoader[StepBatch] | None = None

    def __iter__(self) -> Generator[StepBatch]:
        """Yield the batches. Closing the generator ends the workers."""
        steps = [
            step
            for step in range(self.step + 1, self.last_step + 1)
            if step not in self._skipped_steps
        ]
        # The sampler yields step numbers as indices. An item is the whole batch of a step, so the
        # loader itself must not batch.
        self._loader = StatefulDataLoader(
            _StepDataset(self._samples, self.plan, self.schedule),
            sampler=steps,
            batch_size=None,
            num_workers=self._num_workers,
            pin_memory=self.plan.pin_memory,
            worker_init_fn=_prepare_worker,
            multiprocessing_context=_WorkerContext() if self._num_workers else None,
        )
        try:
            batches = iter(self._loader)
        except OSError as error:
            raise CannotWriteError(
                f"data.num_workers={self._num_workers}: the workers cannot start, because they "
                f"cannot write to /dev/shm: {error.strerror}.\n"
                f"Fix: start the container with --shm-size=1g or more, or set data.num_workers=0"
            ) from error
        try:
            for step, batch in zip(steps, batches, strict=True):
                assert batch.step == step
                self._samples.require_unchanged()  # a worker may have read changed tokens
                self.step = step
                yield batch
        except Exception:
            # changed tokens can cause any error, and a killed worker cannot report the cause
            self._samples.require_unchanged()
            raise
        finally:
            # the frames of an error may keep the iterator alive, so stop the workers explicitly;
            # torch raises here if a worker has died, which would hide the first error
            if self._num_workers:
                with contextlib.suppress(RuntimeError):
                    batches._shutdown_workers()

    def rewind(self, position: Position, *, skipped_steps: frozenset[int]) -> None:
        """Make the next iteration continue from an earlier position."""
        self.schedule = dataclasses.replace(self.schedule, start=position)
        self.step = position.step
        self._skipped_steps = skipped_steps

    @property
    def position(self) -> Position:
        return self.schedule.position(self.step)

    def follows(self, earlier: Position) -> bool:
        """Return True if the steps after an earlier position lead to the current one.

        They do not if some of them used a different batch size.
        """
        schedule = dataclasses.replace(self.schedule, start=earlier)
        return schedule.position(self.step) == self.position

    def state_dict(self) -> dict[str, Any]:
        """Return the content of `data.pt`: the position, the values that it depends on, and
        torchdata's state. Nothing in it depends on the number of ranks.
        """
        return {
            **dataclasses.asdict(self.position),
            "train_batch_size": self.schedule.batch_size,
            "num_samples": self.schedule.num_samples,
            "seed": self.schedule.seed,
            "loader": self._loader.state_dict() if self._loader is not None else {},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `RuntimeError` unless the state has the position that this loader was built for."""
        expected = dataclasses.asdict(self.schedule.start)
        saved = {name: int(state_dict[name]) for name in expected}
        if saved != expected:
            raise RuntimeError(
                f"the checkpoint's data.pt was saved at {saved}, but the data loader is at {expected}"
            )
        if self.position.epoch > self.schedule.start.epoch:
            logger.warning(
                "the data is shorter than before: an epoch now has %s samples, but this epoch has "
                "already trained %s, so training continues with the next epoch",
                f"{self.schedule.num_samples:,}",
                f"{self.schedule.start.samples_consumed:,}",
            )


class ValidationBatches:
    """Yields all samples in order, `batch_size` at a time over all ranks, each exactly once."""

    def __init__(
        self,
        samples: Samples,
        plan: RankPlan,
        *,
        batch_size: int,
    ) -> None:
        self._samples = samples
        self._plan = plan
        self._batch_size = batch_size
        self.length_facts = length_facts(*samples.counts(np.arange(len(samples))))
        self.sources = samples.names if len(samples.names) > 1 else ()

    def __iter__(self) -> Iterator[StepBatch]:
        num_samples = len(self._samples)
        starts = range(0, num_samples, self._batch_size)
        for step, start in enumerate(starts, start=1):
            ids = np.arange(start, min(start + self._batch_size, num_samples))
            self._samples.require_unchanged()
            try:
                batch = build_step(self._samples, ids, self._plan, step=step, epoch=0)
            finally:  # changed tokens can cause any error
                self._samples.require_unchanged()
            yield batch.pin_memory() if self._plan.pin_memory else batch
