"""The batch types that the data loader, the model and the training loop share.

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
    """One micro-batch: documents laid end to end. No token attends to another document.

    `labels_T` is already shifted: `labels_T[t]` is the token that follows `input_ids_T[t]` in its
    document, or `IGNORE_INDEX`. `cu_seqlens_D1` holds the document bounds from 0 to T, int32.

    A rank without work runs a batch of one padding token without a label, so that all ranks call
    the same collectives. In a `share`, fields by token (T, S, and their counts) cover only this
    rank's tokens; fields by document cover all documents.
    """

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_D1: Tensor
    seqlens: tuple[int, ...]
    """Document lengths. They are on the host, so that no kernel launch waits for the device."""
    supervised_S: Tensor
    """Positions in `labels_T` that hold a label, int64. The head computes only these positions."""
    sample_ids: tuple[int, ...]
    sources_D: Tensor
    """Index of each document's source, int64."""
    start: int = 0
    """Index of this batch's first token in the full micro-batch."""

    @classmethod
    def of(
        cls,
        input_ids_T: Tensor,
        labels_T: Tensor,
        *,
        seqlens: tuple[int, ...],
        sample_ids: tuple[int, ...],
        sources_D: Tensor | None = None,
    ) -> "PackedBatch":
        """Return a batch of documents with these lengths, on the host. By default, all documents
        come from the first source.
        """
        if sources_D is None:
            sources_D = torch.zeros(len(seqlens), dtype=torch.int64)
        return cls(
            input_ids_T=input_ids_T,
            labels_T=labels_T,
            position_ids_T=torch.cat([torch.arange(length) for length in seqlens]),
            cu_seqlens_D1=torch.tensor((0, *seqlens)).cumsum(0).to(torch.int32),
            seqlens=seqlens,
            supervised_S=_supervised(labels_T),
            sample_ids=sample_ids,
            sources_D=sources_D,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle tensors as arrays. To send a tensor to another process, torch would use a socket
        in TMPDIR, whose path may be too long.
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
        """Return the tokens that rank `rank` of `size` holds.

        If there are fewer than `size` tokens, padding tokens are appended as a separate document,
        so that every rank holds one token.
        """
        if (missing := size - len(self.input_ids_T)) > 0:
            return PackedBatch.of(
                F.pad(self.input_ids_T, (0, missing)),
                F.pad(self.labels_T, (0, missing), value=IGNORE_INDEX),
                seqlens=(*self.seqlens, missing),
                sample_ids=self.sample_ids,
                sources_D=F.pad(self.sources_D, (0, 1)),
            ).share(rank, size)
        lengths = share_lengths(len(self.input_ids_T), size)
        start = sum(lengths[:rank])
        own = slice(start, start + lengths[rank])
        labels_T = self.labels_T[own]
        return replace(
            self,
            input_ids_T=self.input_ids_T[own],
            labels_T=labels_T,
            position_ids_T=self.position_ids_T[own],
            supervised_S=_supervised(labels_T),
            start=start,
        )

    @property
    def num_loss_tokens(self) -> int:
        return len(self.supervised_S)

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding. The padding document follows those in `sample_ids`."""
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


def _supervised(labels_T: Tensor) -> Tensor:
    """Return the positions of the labels, int64."""
    return (labels_T != IGNORE_INDEX).nonzero()[:, 0]


def share_lengths(num_tokens: int, size: int) -> list[int]:
    """Return how many of a micro-batch's tokens each of `size` ranks holds, in rank order."""
    return [num_tokens * (rank + 1) // size - num_tokens * rank // size for rank in range(size)]


class LossOutput(NamedTuple):
    """Losses and hits of a micro-batch. This is a tuple because FSDP looks in tuples for tensors
    with gradients.
    """

    loss_sum: Tensor
    """Sum of the training loss over the supervised positions, a float64 scalar, from which the
    backward pass starts. Without gradients it is the sum of `losses_S`.
    """
    losses_S: Tensor
    """Cross-entropy of each supervised position, float32, without gradient. `loss_sum` is its sum
    unless the model trains a different loss.
    """
    hits_S: Tensor
    """True where the label was the most likely token; ties count as hits."""
    terms_K: Tensor | None = None
    """Sums of the training loss's additional terms, float64, without gradient. Empty if no position
    is supervised.
    """


def document_sums(batch: PackedBatch, losses_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (summed loss, number of supervised positions) of each document in a micro-batch or
    share, float64 [D].
    """
    # position p is in document d if bounds[d] <= p < bounds[d + 1]
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
    """One rank's micro-batches in one optimizer step, and counts of the global batch.

    Every rank holds the same number of micro-batches. The loss is divided by `num_loss_tokens`.
    """

    step: int
    """Counted from 1."""
    epoch: int
    micro_batches: tuple[PackedBatch, ...]
    num_loss_tokens: int
    num_tokens: int
    num_samples: int
    lengths: tuple[int, ...] = ()
    """Number of tokens of each sample in the global batch, to compute the cost of attention."""
    sample_ids: tuple[int, ...] = ()
    """Sample ids of the global batch, in epoch order. A sample may occur twice if its source is
    repeated.
    """
    loss_tokens_by: Mapping[str, int] = field(default_factory=dict)
    """`num_loss_tokens` by source name, in the order of the indices in `sources_D`; empty if there
    is only one source.
    """
    length_facts: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the sample lengths."""
    deal_facts: Mapping[str, float] = field(default_factory=dict)
    """Statistics of how the batch was packed and dealt to ranks."""

    def pin_memory(self) -> "StepBatch":
        return replace(
            self, micro_batches=tuple(batch.pin_memory() for batch in self.micro_batches)
        )
