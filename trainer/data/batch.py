"""The one contract between data, model and loop.

Shape suffixes: T packed tokens of a micro-batch, D documents in it, S supervised positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: documents laid end to end, never seeing each other.

    `labels_T` is already shifted: `labels_T[t]` is the token to predict after reading
    `input_ids_T[:t + 1]` of the same document, or `IGNORE_INDEX`. `cu_seqlens_D1` are the document
    bounds, first 0, last T, int32; `seqlens` holds the document lengths on the host, so that no kernel launch
    waits for the device. A batch without samples has one token of padding and no label: a rank
    without work runs it to keep collectives matched.

    In a `share`, fields by token (T, S, and their counts) cover only this rank's tokens; fields by
    document cover all documents.
    """

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_D1: Tensor
    seqlens: tuple[int, ...]
    """Document lengths as Python integers (host copy of the differences of `cu_seqlens_D1`)."""
    supervised_S: Tensor
    """Indices of `labels_T` that carry a label, int64: the only positions the head computes."""
    num_loss_tokens: int
    sample_ids: tuple[int, ...]
    sources_D: Tensor
    """Number of the source that each document comes from, int64."""
    start: int = 0
    """Index of its first token in the whole micro-batch."""

    @classmethod
    def of(
        cls,
        input_ids_T: Tensor,
        labels_T: Tensor,
        supervised_S: Tensor,
        *,
        seqlens: tuple[int, ...],
        sample_ids: tuple[int, ...],
        sources_D: Tensor | None = None,
    ) -> "PackedBatch":
        """Make a batch of documents of these lengths, laid end to end, on the host; `sources_D` None: all of
        the first source.
        """
        return cls(
            input_ids_T=input_ids_T,
            labels_T=labels_T,
            position_ids_T=torch.cat([torch.arange(length) for length in seqlens]),
            cu_seqlens_D1=torch.tensor((0, *seqlens)).cumsum(0).to(torch.int32),
            seqlens=seqlens,
            supervised_S=supervised_S,
            num_loss_tokens=len(supervised_S),
            sample_ids=sample_ids,
            sources_D=torch.zeros(len(seqlens), dtype=torch.int64)
            if sources_D is None
            else sources_D,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Between processes by value: torch shares a tensor through a socket in TMPDIR, whose
        path may be too long.
        """
        return {
            name: value.numpy() if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            {
                name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v
                for name, v in state.items()
            }
        )

    def share(self, rank: int, size: int) -> "PackedBatch":
        """The tokens that the `rank`-th of `size` ranks holds. Of fewer than `size` tokens, the
        last ranks hold one of padding each, as a document of its own.
        """
        if (missing := size - len(self.input_ids_T)) > 0:
            return PackedBatch.of(
                F.pad(self.input_ids_T, (0, missing)),
                F.pad(self.labels_T, (0, missing), value=IGNORE_INDEX),
                self.supervised_S,
                seqlens=(*self.seqlens, missing),
                sample_ids=self.sample_ids,
                sources_D=F.pad(self.sources_D, (0, 1)),
            ).share(rank, size)
        lengths = share_lengths(len(self.input_ids_T), size)
        start = sum(lengths[:rank])
        own = slice(start, start + lengths[rank])
        labels_T = self.labels_T[own]
        supervised_S = (labels_T != IGNORE_INDEX).nonzero()[:, 0]
        return replace(
            self,
            input_ids_T=self.input_ids_T[own],
            labels_T=labels_T,
            position_ids_T=self.position_ids_T[own],
            supervised_S=supervised_S,
            num_loss_tokens=len(supervised_S),
            start=start,
        )

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlens)

    @property
    def num_tokens(self) -> int:
        """Real tokens: those of samples, 0 where there are none."""
        return max(
            0, min(len(self.input_ids_T), sum(self.seqlens[: len(self.sample_ids)]) - self.start)
        )

    def pin_memory(self) -> "PackedBatch":
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> "PackedBatch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> "PackedBatch":
        changed: dict[str, Any] = {
            name: fn(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)


def share_lengths(num_tokens: int, size: int) -> list[int]:
    """Return how many tokens of a micro-batch each of `size` ranks holds, in rank order."""
    return [num_tokens * (rank + 1) // size - num_tokens * rank // size for rank in range(size)]


class LossOutput(NamedTuple):
    """Losses and hits of a micro-batch; a tuple, because FSDP looks for the tensors in it
    that carry gradients.
    """

    loss_sum: Tensor
    """Sum of the trained loss over the supervised positions, float64 scalar: it is differentiated.
    Without gradients it is the sum of `losses_S`."""
    losses_S: Tensor
    """Cross-entropy of each supervised position, float32, without gradient; `loss_sum` is its sum
    unless the model trains another loss."""
    hits_S: Tensor
    """True where no token was likelier than the label."""
    terms_K: Tensor | None = None
    """Sums of the terms of the trained loss beside the main one, float64, without gradient."""


def document_sums(batch: PackedBatch, losses_S: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss, number of supervised positions) of each document of a micro-batch or share,
    float64 [D].
    """
    document_S = torch.bucketize(
        batch.supervised_S + batch.start, batch.cu_seqlens_D1[1:].long(), right=True
    )
    sums_D = torch.zeros(len(batch.seqlens), dtype=torch.float64, device=losses_S.device)
    counts_D = torch.zeros_like(sums_D)
    sums_D.index_add_(0, document_S, losses_S.double())
    counts_D.index_add_(0, document_S, torch.ones_like(losses_S, dtype=torch.float64))
    return sums_D, counts_D


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one rank in one optimizer step, with the global counts the loss is divided by.

    Every rank holds the same number of micro-batches; `num_loss_tokens` and `num_samples` count the
    whole global batch.
    """

    step: int
    """Counted from 1."""
    epoch: int
    micro_batches: tuple[PackedBatch, ...]
    num_loss_tokens: int
    num_tokens: int
    num_samples: int
    lengths: tuple[int, ...] = ()
    """Tokens of each sample of the global batch: attention costs more than in proportion to
    them.
    """
    sample_ids: tuple[int, ...] = ()
    """The samples of the global batch, in the order of the epoch; a sample may come twice where its source
    is repeated.
    """
    loss_tokens_by: Mapping[str, int] = field(default_factory=dict)
    """`num_loss_tokens` by name of source, in the order that `sources_D` counts; empty where
    there is but one.
    """
    length_facts: Mapping[str, float] = field(default_factory=dict)
    """Statistics of sample lengths, and of how the batch was packed and dealt."""
    deal_facts: Mapping[str, float] = field(default_factory=dict)

    def pin_memory(self) -> "StepBatch":
        return replace(
            self, micro_batches=tuple(batch.pin_memory() for batch in self.micro_batches)
        )
