"""From the plan to batches: one item per optimizer step. The position of a run is one integer, the step."""

import dataclasses
import hashlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing import context, popen_fork
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer.batch import IGNORE_INDEX, PackedBatch, StepBatch
from trainer.data.batch_plan import Limits, Schedule, split_batch
from trainer.data.facts import deal_facts, length_facts
from trainer.data.token_cache import TokenDataset
from trainer.protocols import Position
from trainer.runtime.signals import STOP_SIGNALS


class Samples(Protocol):
    """Prepared samples: `lengths` and `num_loss_tokens` int arrays [N], and tokens with loss mask by index."""

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def num_loss_tokens(self) -> np.ndarray: ...

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class View:
    """Some samples of a prepared dataset, under indices of their own."""

    def __init__(self, dataset: TokenDataset, indices: np.ndarray) -> None:
        self.dataset, self._indices = dataset, indices
        self.lengths = np.asarray(dataset.lengths)[indices]
        self.num_loss_tokens = np.asarray(dataset.num_loss_tokens)[indices]

    @classmethod
    def whole(cls, dataset: TokenDataset) -> "View":
        return cls(dataset, np.arange(len(dataset)))

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order."""
        digest = hashlib.sha256(self.dataset.fingerprint.encode())
        digest.update(np.ascontiguousarray(self._indices, dtype=np.int64).tobytes())
        return digest.hexdigest()[:16]

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.dataset.sample(int(self._indices[index]))

    def location(self, index: int) -> str:
        """`file:line` of a sample."""
        return self.dataset.location(int(self._indices[index]))


@dataclass(frozen=True)
class RankPlan:
    """How this rank takes its part of every global batch."""

    rank: int
    world_size: int
    limits: Limits
    quadratic_cost: float


def pack(samples: Samples, indices: list[int]) -> PackedBatch:
    """Lay samples end to end and shift labels inside each; no samples gives one token of padding without a label."""
    if not indices:
        parts = [(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=bool))]
    else:
        parts = [samples.sample(index) for index in indices]
    seqlens = tuple(len(ids) for ids, _ in parts)
    ids_T = np.concatenate([ids for ids, _ in parts]).astype(np.int64)
    labels_T = np.full(len(ids_T), IGNORE_INDEX, dtype=np.int64)
    start = 0
    for ids, mask in parts:
        shifted = np.where(mask[1:], ids[1:], IGNORE_INDEX)
        labels_T[start : start + len(shifted)] = shifted
        start += len(ids)
    supervised_S = np.flatnonzero(labels_T != IGNORE_INDEX)
    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        labels_T=torch.from_numpy(labels_T),
        position_ids_T=torch.from_numpy(np.concatenate([np.arange(n) for n in seqlens])),
        cu_seqlens_D1=torch.from_numpy(np.cumsum((0, *seqlens)).astype(np.int32)),
        seqlens=seqlens,
        supervised_S=torch.from_numpy(supervised_S),
        num_loss_tokens=len(supervised_S),
        sample_ids=tuple(indices),
    )


def build_step(samples: Samples, ids: np.ndarray, plan: RankPlan, *, step: int, epoch: int) -> StepBatch:
    """This rank's micro-batches of the global batch `ids` (int64 sample ids), with the global counts."""
    lengths, num_loss_tokens = samples.lengths[ids], samples.num_loss_tokens[ids]
    dealt = split_batch(lengths, world_size=plan.world_size, limits=plan.limits, quadratic_cost=plan.quadratic_cost)
    micro_batches = tuple(pack(samples, [int(ids[i]) for i in members]) for members in dealt[plan.rank])
    return StepBatch(
        step=step,
        epoch=epoch,
        micro_batches=micro_batches,
        num_loss_tokens=int(num_loss_tokens.sum()),
        num_tokens=int(lengths.sum()),
        num_samples=len(ids),
        sum_squared_lengths=int((lengths.astype(np.int64) ** 2).sum()),
        sample_ids=tuple(int(i) for i in ids),
        length_facts=length_facts(lengths, num_loss_tokens),
        deal_facts=deal_facts(lengths, num_loss_tokens, dealt, plan.limits),
    )


class _StepDataset(Dataset[StepBatch]):
    def __init__(self, samples: Samples, plan: RankPlan, schedule: Schedule) -> None:
        self.samples, self.plan, self.schedule = samples, plan, schedule

    def __getitem__(self, step: int) -> StepBatch:
        epoch = self.schedule.position(step).epoch
        return build_step(self.samples, self.schedule.samples(step), self.plan, step=step, epoch=epoch)


class _WorkerHandle(popen_fork.Popen):
    def terminate(self) -> None:
        self.kill()  # a worker ignores SIGTERM, and a process that is about to exit waits for those it has terminated


class _Worker(context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _WorkerHandle:  # noqa: N802  a name of multiprocessing
        return _WorkerHandle(process_obj)


class _WorkerContext(context.ForkContext):
    Process = _Worker


def _ignore_signals(worker_id: int) -> None:
    """Stop signals are the training process's business; workers live until it no longer needs them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


class TrainLoader:
    """Steps `[schedule.start.step, total_steps)` of a run: every position is resumable, on any number of ranks."""

    def __init__(
        self,
        samples: Samples,
        *,
        plan: RankPlan,
        schedule: Schedule,
        total_steps: int,
        num_workers: int,
        pin_memory: bool,
        skipped_steps: frozenset[int] = frozenset(),
    ) -> None:
        """`skipped_steps`, counted from 1, are passed over: their batches are never trained."""
        self._samples, self._plan, self._schedule = samples, plan, schedule
        self._num_workers, self._pin_memory, self._skipped_steps = num_workers, pin_memory, skipped_steps
        self.last_step = total_steps
        self.next_step = schedule.start.step

    def __iter__(self) -> Generator[StepBatch]:
        """Its workers are gone when the generator is closed."""
        steps = [step for step in range(self.next_step, self.last_step) if step + 1 not in self._skipped_steps]
        loader = DataLoader(
            _StepDataset(self._samples, self._plan, self._schedule),
            sampler=steps,
            batch_size=None,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_ignore_signals,
            multiprocessing_context=_WorkerContext() if self._num_workers else None,
        )
        batches = iter(loader)
        try:
            for step, batch in zip(steps, batches, strict=True):
                if batch.step != step:
                    raise RuntimeError(f"loader returned step {batch.step} where step {step} was due")
                self.next_step = step + 1
                yield batch
        finally:
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                # the frames of an error may keep the iterator, which would stop them when it goes
                batches._shutdown_workers()

    def rewind(self, position: Position, *, skipped_steps: frozenset[int]) -> None:
        """Go on from an earlier position the next time this is iterated."""
        self._schedule = dataclasses.replace(self._schedule, start=position)
        self.next_step, self._skipped_steps = position.step, skipped_steps

    @property
    def position(self) -> Position:
        return self._schedule.position(self.next_step)

    def state_dict(self) -> dict[str, Any]:
        """`data.pt`: the position, and what it counts in. Nothing in it depends on ranks."""
        return {
            **dataclasses.asdict(self.position),
            "train_batch_size": self._schedule.batch_size,
            "num_samples": self._schedule.num_samples,
            "seed": self._schedule.seed,
        }


def validation_batches(
    samples: Samples, plan: RankPlan, *, batch_size: int, pin_memory: bool
) -> Callable[[], Iterator[StepBatch]]:
    """A function that walks all samples in order, every one once over all ranks, `batch_size` at a time."""
    num_samples = len(samples.lengths)

    def batches() -> Iterator[StepBatch]:
        for step, start in enumerate(range(0, num_samples, batch_size)):
            ids = np.arange(start, min(start + batch_size, num_samples))
            batch = build_step(samples, ids, plan, step=step, epoch=0)
            yield batch.pin_memory() if pin_memory else batch

    return batches
