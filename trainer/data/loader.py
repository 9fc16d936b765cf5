"""Builds the planned batches with torchdata's `StatefulDataLoader`, one item per optimizer step.

The position of a run is one integer, the step. Checkpoints also store torchdata's own state, for
tools that read it.
"""

import contextlib
import dataclasses
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


def pack(samples: Samples, indices: list[int]) -> PackedBatch:
    """Lay samples end to end, and shift the labels within each sample. Without samples, the batch
    has one padding token and no label.
    """
    if not indices:
        parts = [(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=bool))]
    else:
        parts = [samples.sample(index) for index in indices]
    ids_T = np.concatenate([ids for ids, _ in parts]).astype(np.int64)
    mask_T = np.concatenate([mask for _, mask in parts])
    seqlens = tuple(len(ids) for ids, _ in parts)
    mask_T[np.cumsum(seqlens)[:-1]] = False  # nothing predicts the first token of a document
    supervised_S = np.flatnonzero(mask_T[1:])
    labels_T = np.full(len(ids_T), IGNORE_INDEX, dtype=np.int64)
    labels_T[supervised_S] = ids_T[supervised_S + 1]
    return PackedBatch.of(
        torch.from_numpy(ids_T),
        torch.from_numpy(labels_T),
        torch.from_numpy(supervised_S),
        seqlens=seqlens,
        sample_ids=tuple(indices),
        sources_D=torch.from_numpy(samples.source_of(indices)) if indices else None,
    )


def build_step(
    samples: Samples, ids: np.ndarray, plan: RankPlan, *, step: int, epoch: int
) -> StepBatch:
    """Return this rank's micro-batches of the global batch `ids` (int64 sample ids), with the
    global counts.
    """
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
    def __init__(self, samples: Samples, plan: RankPlan, schedule: Schedule) -> None:
        self.samples, self.plan, self.schedule = samples, plan, schedule

    def __getitem__(self, step: int) -> StepBatch:
        # reading beyond the end of a truncated file would kill this process
        self.samples.require_unchanged()
        epoch = self.schedule.position(step - 1).epoch
        ids = self.samples.of_rows(self.schedule.rows(step))
        return build_step(self.samples, ids, self.plan, step=step, epoch=epoch)


class _WorkerHandle(popen_fork.Popen):
    def terminate(self) -> None:
        # a worker ignores SIGTERM, and an exiting process waits for the workers that it terminated
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
    """Yields the steps after `schedule.start` up to `total_steps`, counted from 1. A run can resume
    after each step, on any number of ranks.
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
        """`skipped_steps` are left out: the model is never trained on their batches."""
        self._samples, self.plan, self.schedule = samples, plan, schedule
        self._num_workers, self._skipped_steps = num_workers, skipped_steps
        self.last_step = total_steps
        self.step = schedule.start.step
        """The last step that was yielded. Once it has been trained, this is the number of finished
        steps.
        """
        self._loader: StatefulDataLoader[StepBatch] | None = None

    def __iter__(self) -> Generator[StepBatch]:
        """Yield the batches. The workers have ended once the generator is closed."""
        steps = [
            step
            for step in range(self.step + 1, self.last_step + 1)
            if step not in self._skipped_steps
        ]
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
                f"data.num_workers={self._num_workers}: the workers cannot start, because /dev/shm "
                f"cannot be written: {error.strerror}.\n"
                f"Fix: start the container with --shm-size=1g or more, or set data.num_workers=0"
            ) from error
        try:
            for step, batch in zip(steps, batches, strict=True):
                assert batch.step == step
                self._samples.require_unchanged()  # the batch may have been read up to now
                self.step = step
                yield batch
        # changed tokens may hold anything, and a killed worker cannot give the reason
        except Exception:
            self._samples.require_unchanged()
            raise
        finally:
            # an error's frames may keep the iterator alive, so stop the workers explicitly
            # if a worker dies meanwhile, torch raises here, which would hide the error above
            if self._num_workers:
                with contextlib.suppress(RuntimeError):
                    batches._shutdown_workers()

    def rewind(self, position: Position, *, skipped_steps: frozenset[int]) -> None:
        """Let the next iteration continue from an earlier position."""
        self.schedule = dataclasses.replace(self.schedule, start=position)
        self.step, self._skipped_steps = position.step, skipped_steps

    @property
    def position(self) -> Position:
        return self.schedule.position(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of `data.pt`: the position, the values that define its units, and the
        loader's own state.

        Nothing in it depends on the number of ranks.
        """
        return {
            **dataclasses.asdict(self.position),
            "train_batch_size": self.schedule.batch_size,
            "num_samples": self.schedule.num_samples,
            "seed": self.schedule.seed,
            "loader": self._loader.state_dict() if self._loader is not None else {},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the state has this loader's position, which was chosen before anything was
        built. Raises `RuntimeError` if it differs.
        """
        saved = Position(*(int(state_dict[field.name]) for field in dataclasses.fields(Position)))
        if saved != self.position:
            raise RuntimeError(
                f"the checkpoint was saved at {saved}, but the data would continue at {self.position}"
            )


class ValidationBatches:
    """Yields all samples in order, `batch_size` at a time. Over all ranks, each sample comes
    exactly once.
    """

    def __init__(self, samples: Samples, plan: RankPlan, *, batch_size: int) -> None:
        self._samples, self._plan, self._batch_size = samples, plan, batch_size
        self._num_samples = len(samples.lengths)
        self.length_facts = length_facts(*samples.counts(np.arange(self._num_samples)))
        self.sources = samples.names if len(samples.names) > 1 else ()

    def __iter__(self) -> Iterator[StepBatch]:
        for index, start in enumerate(range(0, self._num_samples, self._batch_size)):
            ids = np.arange(start, min(start + self._batch_size, self._num_samples))
            self._samples.require_unchanged()
            try:
                batch = build_step(self._samples, ids, self._plan, step=index + 1, epoch=0)
            finally:  # changed tokens may hold anything
                self._samples.require_unchanged()
            yield batch.pin_memory() if self._plan.pin_memory else batch
