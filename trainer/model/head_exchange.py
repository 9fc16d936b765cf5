"""Sequence parallelism: each rank holds a share of a micro-batch's positions, and computes
attention over all positions for its share of the heads.

The ranks of a data rank exchange positions for heads (DeepSpeed Ulysses, 2023). Each layer sends
`(size - 1) / size` of its queries, keys, values and outputs once, and of their gradients once.

Shape suffixes: N heads, T positions, K head size. The ranks' shares of the positions differ by at
most one.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from trainer.config import ConfigError
from trainer.data.batch import share_lengths
from trainer.model.cpu_attention import Scoring


def require_divisible(num_query_heads: int, size: int) -> None:
    """Raise `ConfigError` if the ranks cannot hold equal shares of the heads."""
    if num_query_heads % size:
        possible = [n for n in range(1, num_query_heads + 1) if num_query_heads % n == 0]
        raise ConfigError(
            f"model.ulysses_sequence_parallel_size={size} does not divide the {num_query_heads} "
            f"attention heads of this model.\n"
            f"Fix: set it to one of {possible}"
        )


class HeadExchange:
    """Exchange heads and positions of one micro-batch among the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, *, num_tokens: int) -> None:
        self._group = group
        self._size = group.size()
        self._rank = group.rank()
        self._lengths = share_lengths(num_tokens, self._size)

    @torch.compiler.disable
    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor, Scoring], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Call `attention` on q, k, v [1, heads, T, K] with all positions and this rank's heads.

        Return [1, T, N, K] with this rank's positions and all heads.
        """
        require_divisible(query.shape[1], self._size)
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.chunk(self._size)[self._rank])
        key = self._to_heads(self._repeated(key))
        value = self._to_heads(self._repeated(value))
        return self._to_positions(attention(self._to_heads(query), key, value, scoring))

    @property
    def num_own(self) -> int:
        """Number of positions that this rank holds."""
        return self._lengths[self._rank]

    def gathered(self, own: Tensor) -> Tensor:
        """Exchange [1, own T, ...] for [1, T, ...]. The gradient is the sum of all ranks'.

        Every rank sends its part to every rank, because the parts may differ in length.
        """
        sent = own.repeat(self._size, *[1] * (own.ndim - 1)).flatten(0, 1)
        return self._exchanged(sent, self._lengths, [self.num_own] * self._size)[None]

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's part of [1, T, ...]."""
        return rows.split(self._lengths, dim=1)[self._rank]

    def _repeated(self, key: Tensor) -> Tensor:
        """Repeat key heads until every rank has one. Neighbouring query heads share a key head.

        M key heads become lcm(M, ranks), the smallest number that the ranks can divide evenly.
        """
        return key.repeat_interleave(self._size // gcd(self._size, key.shape[1]), dim=1)

    def _to_heads(self, heads: Tensor) -> Tensor:
        """Exchange [1, N, own T, K] for [1, own N, T, K].

        The rows that are sent have the shape [ranks * own T, N / ranks, K]: for each rank, all own
        positions of that rank's heads. The received rows are the positions of all ranks in order.
        """
        length, head_size = heads.shape[2:]
        sent = (
            heads[0]
            .transpose(0, 1)
            .reshape(length, self._size, -1, head_size)
            .transpose(0, 1)
            .flatten(0, 1)
        )
        return self._exchanged(sent, self._lengths, [length] * self._size).transpose(0, 1)[None]

    def _to_positions(self, output: Tensor) -> Tensor:
        """Exchange [1, T, own N, K] for [1, own T, N, K]."""
        length = self.num_own
        by_rank = self._exchanged(output[0], [length] * self._size, self._lengths)
        return by_rank.unflatten(0, (self._size, length)).transpose(0, 1).flatten(1, 2)[None]

    def _exchanged(
        self,
        sent: Tensor,
        num_received: list[int],
        num_sent: list[int],
    ) -> Tensor:
        return all_to_all_single_autograd(sent.contiguous(), num_received, num_sent, self._group)
