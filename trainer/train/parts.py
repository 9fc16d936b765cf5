"""`Part`, the interface of objects that act in every step, and the built-in parts.

To add a part, add it to `trainer.train.run.PARTS`.

Shape suffixes: S supervised positions and D documents of a micro-batch, K additional terms of the
loss, L layers with experts, E experts. A leading 2 stands for (summed loss, number of labels).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.data.batch import LossOutput, PackedBatch, StepBatch, document_sums
from trainer.model.experts import Routers
from trainer.optim.clip import local_square_sum, square_sum
from trainer.tracking.row_losses import SampleLosses
from trainer.train.packet import Packet, Totals, Values
from trainer.train.source_losses import losses_by_source

RARE_EVERY = 50
"""Steps between measurements that are costly (a pass over all parameters) or change slowly."""


@dataclass(frozen=True)
class Decision:
    """The guard's decision about a step, equal on all ranks."""

    rollback_onset: int | None = None
    """The step at which the trouble began. The run returns to a checkpoint before it."""
    is_stop: bool = False
    """True if the run stops, unless it can be rolled back."""
    reason: str = ""


@dataclass
class StepResult:
    """A finished step, with its totals on the host."""

    batch: StepBatch
    totals: Totals
    lr: float
    signals: dict[str, float] = field(default_factory=dict)
    """Metrics that are bit-equal on all ranks, so the guard and its rules may act on them."""
    row: dict[str, float] = field(default_factory=dict)
    """All other metrics."""
    decision: Decision = Decision()


class Part:
    """An object that acts in every step. A subclass overrides only the methods that it needs.

    The methods are listed in the order in which a step calls them. Each checkpoint saves the result
    of `state_dict` under the part's name, and it is loaded when the run resumes or rolls back.
    """

    is_sharded: ClassVar[bool] = False
    """True if the state maps names to DTensors, which can be resharded when the run resumes on a
    different number of ranks. Any other state must be equal on all ranks, unless the class sets `state_of` (see
    `trainer.runtime.progress`).
    """

    def after_micro_batch(
        self,
        batch: StepBatch,
        inputs: PackedBatch,
        output: LossOutput,
    ) -> Tensor | None:
        """Act between the forward and backward passes of a micro-batch.

        If this returns a scalar, the scalar is added to the training loss. It must be the
        micro-batch's share of a mean over the global batch, because gradients are summed over
        micro-batches and ranks.
        """
        return None

    def sums(self, batch: StepBatch) -> Values:
        """Return scalars and tensors to be summed over ranks, by name.

        The step's single reduction sums them before the update. Names and shapes must be equal on
        all ranks. A scalar with the name of a metric is logged.
        """
        return {}

    def by_rank(self) -> Values:
        """Return this rank's scalars. The step's single all-reduce makes them available on all ranks."""
        return {}

    def after_update(self, batch: StepBatch, packet: Packet) -> Mapping[str, Tensor]:
        """Act after the update, while the sums are still on the device.

        The returned scalars are copied to the host together with the sums.
        """
        return {}

    def signals(self, step: StepResult) -> Mapping[str, float]:
        """Return metrics that are bit-equal on all ranks."""
        return {}

    def after_step(self, step: StepResult) -> None:
        """Act on the totals and signals of a step, and add metrics to its row."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart needs."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a saved state."""


class RouterLoad(Routers, Part):
    """The auxiliary loss of a mixture-of-experts model, and the load on each expert."""

    def after_micro_batch(
        self,
        batch: StepBatch,
        inputs: PackedBatch,
        output: LossOutput,
    ) -> Tensor | None:
        return self.add(inputs, batch.num_tokens)

    def sums(self, batch: StepBatch) -> Values:
        loss, tokens_LE = self.take()
        return {**loss, "expert_tokens": tokens_LE}

    def after_update(self, batch: StepBatch, packet: Packet) -> Mapping[str, Tensor]:
        return self.settle(packet.sums["expert_tokens"], batch)


class _VectorSum(Part):
    """A vector that accumulates over micro-batches and is then summed over ranks under `name`."""

    name: ClassVar[str]
    _sum: Tensor | None = None

    def _add(self, values: Tensor) -> None:
        self._sum = values if self._sum is None else self._sum + values

    def sums(self, batch: StepBatch) -> Values:
        found = self._sum
        self._sum = None
        return {} if found is None else {self.name: found}


class SourceLosses(_VectorSum):
    """The loss on each source of training data. Inactive with a single source."""

    name = "loss_by_source"

    def after_micro_batch(
        self,
        batch: StepBatch,
        inputs: PackedBatch,
        output: LossOutput,
    ) -> None:
        if batch.loss_tokens_by:
            sums_D, _ = document_sums(inputs, output.losses_S)
            zeros = sums_D.new_zeros(len(batch.loss_tokens_by))
            self._add(zeros.index_add_(0, inputs.sources_D, sums_D))

    def signals(self, step: StepResult) -> Mapping[str, float]:
        sums = map(float, step.totals.vectors.get(self.name, ()))
        return losses_by_source("train", sums, step.batch.loss_tokens_by)


class LossTerms(_VectorSum):
    """Logs the named terms that a loss function adds to its main term."""

    name = "loss_terms"

    def __init__(self, model: nn.Module) -> None:
        own: Any = model
        self._names: tuple[str, ...] = own.loss_terms

    def after_micro_batch(
        self,
        batch: StepBatch,
        inputs: PackedBatch,
        output: LossOutput,
    ) -> None:
        if self._names and output.terms_K is not None:
            # without a supervised position, there are no terms, but other ranks sum K of them
            zeros_K = output.losses_S.new_zeros(len(self._names), dtype=torch.float64)
            self._add(output.terms_K if len(output.terms_K) else zeros_K)

    def signals(self, step: StepResult) -> Mapping[str, float]:
        sums = step.totals.vectors.get(self.name, ())
        return {
            f"train/objective/{name}": float(value) / step.batch.num_loss_tokens
            for name, value in zip(self._names, sums, strict=False)
        }


class RowLosses(Part):
    """Logs the loss of each sample in the global batch, summed over micro-batches and ranks."""

    def __init__(self, log: Callable[[int, SampleLosses], None]) -> None:
        """`log` is called with the step and its losses, on every rank."""
        self._log = log
        self._found: list[tuple[tuple[int, ...], Tensor]] = []

    def after_micro_batch(
        self,
        batch: StepBatch,
        inputs: PackedBatch,
        output: LossOutput,
    ) -> None:
        sums_2D = torch.stack(document_sums(inputs, output.losses_S))
        ids = inputs.sample_ids  # a padding document may follow these
        self._found.append((ids, sums_2D[:, : len(ids)]))

    def sums(self, batch: StepBatch) -> Values:
        found = self._found
        self._found = []
        ids = dict.fromkeys(batch.sample_ids)
        places = {sample_id: place for place, sample_id in enumerate(ids)}
        own = [places[sample_id] for own_ids, _ in found for sample_id in own_ids]
        sums_2D = torch.cat([sums_2D for _, sums_2D in found], dim=1)
        index_D = torch.tensor(own, dtype=torch.int64).to(sums_2D.device, non_blocking=True)
        totals = sums_2D.new_zeros(2, len(places)).index_add_(1, index_D, sums_2D)
        return {"sample_losses": totals}

    def after_step(self, step: StepResult) -> None:
        loss_sums, tokens = step.totals.vectors["sample_losses"]
        ids = tuple(dict.fromkeys(step.batch.sample_ids))
        self._log(step.batch.step, SampleLosses(ids, tokens, loss_sums))


class Norms(Part):
    """Logs the norms of the parameters and of each block's gradient before every 50th update."""

    def __init__(self, blocks: Mapping[str, Sequence[nn.Parameter]], *, num_replicas: int) -> None:
        self._blocks = blocks
        self._num_replicas = num_replicas

    def sums(self, batch: StepBatch) -> Values:
        if not is_rare(batch.step):
            return {}
        blocks = self._blocks.values()
        parameters = list(chain.from_iterable(blocks))
        # The squared norm of all parameters, then of each block's gradient. Replicas hold equal
        # shards, so the sum over ranks would count each of them several times.
        squares = torch.stack([square_sum(parameters), *map(local_square_sum, blocks)])
        return {"squares": squares / self._num_replicas}

    def after_step(self, step: StepResult) -> None:
        if (squares := step.totals.vectors.get("squares")) is not None:
            names = ("optim/param_norm", *(f"optim/grad_norm/{name}" for name in self._blocks))
            step.row.update(zip(names, map(math.sqrt, squares), strict=True))


def is_rare(step: int) -> bool:
    """Return True if a step (counted from 1) includes costly and slowly changing measurements."""
    return step % RARE_EVERY == 0


def blocks_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by block: a numbered layer, or else the containing module."""
    blocks: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = re.match(r"(.*?\.\d+)\.", name)
            block = layer[1] if layer else name.rpartition(".")[0]
            blocks.setdefault(block, []).append(parameter)
    return blocks
