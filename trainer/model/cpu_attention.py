"""Packed attention on CPUs: documents of similar length run side by side, as batched matrix
products.

torch's fused CPU kernel takes one document at a time, and its backward pass is what a step of a
small model mostly waits for. Here a group of documents, padded to its longest, is one batch;
queries go in blocks that meet only the keys they may see. Scores are rounded to the compute dtype
before the softmax, as in transformers' eager attention.

Shape suffixes: N query heads, M key heads, G = N / M query heads that share one, T packed tokens, D
documents of a group, L its padded length, P places (all groups' padded rows), B queries of a block,
C keys they may see, K head size.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_QUERIES = 128
MAX_PADDING = 0.1
"""A group's longest document is at most this much longer than its shortest."""
KEEP_LENGTH = 512
"""Probabilities of documents up to this length are kept for the backward pass, of longer ones
computed again: memory stays linear in the length."""


@dataclass(frozen=True)
class Scoring:
    """What becomes of the products of queries and keys before they weigh values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    """c makes c * tanh(score / c) of each score."""
    sinks: Tensor | None = None
    """[N]: one more score per head in the softmax, as of a key without a value."""
    dropout: float = 0.0


class DocumentGroups:
    """The groups of a micro-batch and how the rows (token, head) of queries and keys are laid
    out in them.
    """

    def __init__(
        self, seqlens: tuple[int, ...], *, num_query_heads: int, num_key_heads: int
    ) -> None:
        members = group_by_length(seqlens)
        self.num_key_heads, self.heads_per_key = num_key_heads, num_query_heads // num_key_heads
        self.shapes = [(len(group), seqlens[group[0]]) for group in members]
        """(D, L) of each group."""
        starts = np.cumsum((0, *seqlens))
        tokens, paddings = [], []
        for group in members:
            position_L = np.arange(seqlens[group[0]])
            lengths_D1 = np.array([seqlens[index] for index in group])[:, None]
            tokens.append(starts[group][:, None] + np.minimum(position_L, lengths_D1 - 1))
            paddings.append(position_L >= lengths_D1)
        heads_MG = np.arange(num_query_heads).reshape(num_key_heads, 1, self.heads_per_key)
        heads_M1 = np.arange(num_key_heads).reshape(num_key_heads, 1, 1)
        self.queries = RowLayout(
            tokens, paddings, heads_MG, num_rows=int(starts[-1]) * num_query_heads
        )
        self.keys = RowLayout(tokens, paddings, heads_M1, num_rows=int(starts[-1]) * num_key_heads)

    def split(self, *places: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Views of each group: [D * M, L * G, K] of what has as many places as the queries, [D
        * M, L, K] of keys.
        """
        first = 0
        for num_documents, length in self.shapes:
            batch = num_documents * self.num_key_heads
            last = first + batch * length
            views = []
            for tensor_PK in places:
                per_key = len(tensor_PK) // len(self.keys.rows)
                views.append(
                    tensor_PK[first * per_key : last * per_key].view(batch, length * per_key, -1)
                )
            yield tuple(views)
            first = last


class RowLayout:
    """Which row (token * heads + head) stands at each of P places, int64; a padded place repeats
    the last token's.

    `rows_or_zero` has padded places point one row further, where a row of zeros is put; `places` is
    the way back.
    """

    def __init__(
        self,
        tokens: list[np.ndarray],
        paddings: list[np.ndarray],
        heads: np.ndarray,
        *,
        num_rows: int,
    ) -> None:
        rows = [(group[:, None, :, None] * heads.size + heads) for group in tokens]
        padded = [
            np.broadcast_to(p[:, None, :, None], r.shape).ravel()
            for p, r in zip(paddings, rows, strict=True)
        ]
        rows_P, is_padding_P = (
            np.concatenate([group.ravel() for group in rows]),
            np.concatenate(padded),
        )
        places = np.empty(num_rows, dtype=np.int64)
        places[rows_P[~is_padding_P]] = np.flatnonzero(~is_padding_P)
        self.rows = torch.from_numpy(rows_P)
        self.rows_or_zero = torch.from_numpy(np.where(is_padding_P, num_rows, rows_P))
        self.places = torch.from_numpy(places)


def group_by_length(seqlens: tuple[int, ...]) -> list[list[int]]:
    """Indices of documents, longest first, cut where one is too short for the longest of its
    group.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(seqlens)), key=lambda i: -seqlens[i]):
        if groups and seqlens[groups[-1][0]] <= seqlens[index] * (1 + MAX_PADDING):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of every document of a group; they see keys from `first_key` on."""

    first: int
    last: int
    first_key: int
    heads_per_key: int
    scoring: Scoring

    @property
    def rows(self) -> slice:
        return slice(self.first * self.heads_per_key, self.last * self.heads_per_key)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.last)

    def probabilities(self, queries: Tensor, keys: Tensor, sinks_MG: Tensor | None) -> Tensor:
        """softmax over the keys that each query may see: [D * M, B * G, C], and one column more
        for sinks.
        """
        scores = self._scores(queries, keys)
        # what a window does not hide: all keys before the block are seen by all of its queries
        window = self.scoring.sliding_window
        first_masked = self.first if window is None or self.last <= window else self.first_key
        scores[:, :, first_masked - self.first_key :] += _mask(
            self.last - self.first,
            self.last - first_masked,
            self.heads_per_key,
            window,
            queries.dtype,
        )
        if sinks_MG is not None:
            column = sinks_MG.to(scores.dtype).repeat(
                len(scores) // len(sinks_MG), self.last - self.first
            )
            scores = torch.cat([scores, column[..., None]], -1)
        return torch.softmax(scores, -1)

    def score_gradient(self, grad_p: Tensor, p: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Of what `probabilities` made p of; grad_p has no column for sinks, since those have
        no value.
        """
        num_keys = grad_p.shape[2]
        grad = torch._softmax_backward_data(
            F.pad(grad_p, (0, p.shape[2] - num_keys)), p, -1, p.dtype
        )
        if self.scoring.softcap is not None:
            grad[..., :num_keys] *= (
                1 - (self._scores(queries, keys) / self.scoring.softcap).square_()
            )
        return grad

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores = _scaled_bmm(
            queries[:, self.rows], keys[:, self.keys].transpose(1, 2), self.scoring.scaling
        )
        cap = self.scoring.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def blocks(length: int, heads_per_key: int, scoring: Scoring) -> Iterator[Block]:
    for first in range(0, length, BLOCK_QUERIES):
        first_key = (
            0 if scoring.sliding_window is None else max(0, first - scoring.sliding_window + 1)
        )
        yield Block(first, min(first + BLOCK_QUERIES, length), first_key, heads_per_key, scoring)


@functools.cache
def _mask(
    num_queries: int,
    num_keys: int,
    heads_per_key: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """[B * G, C] with 0 where a query sees a key and -inf elsewhere; the last query is as far
    as the last key.
    """
    positions = torch.arange(num_keys - num_queries, num_keys).repeat_interleave(heads_per_key)[
        :, None
    ]
    distances = positions - torch.arange(num_keys)
    is_hidden = (distances < 0) | (distances >= (sliding_window or num_keys))
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))


def _scaled_bmm(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right, scaled before it is rounded."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: DocumentGroups, scoring: Scoring
) -> Tensor:
    """Causal attention of queries [1, N, T, K] over keys and values [1, M, T, K]. Returns [1,
    T, N, K].
    """
    output: Tensor = _GroupedAttention.apply(query, key, value, scoring.sinks, groups, scoring)
    return output


class _GroupedAttention(torch.autograd.Function):
    """p = softmax(s q k^T), o = p v; dv = p^T do, dz = p * (dp - rowsum(p * dp)) with dp = do v^T,
    dq = s dz k, dk = s dz^T q; c * tanh(z / c) has the gradient 1 - tanh(z / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        groups: DocumentGroups,
        scoring: Scoring,
    ) -> Tensor:
        query_PK = _rows(query.transpose(1, 2))[groups.queries.rows]
        key_PK, value_PK = (_rows(x.transpose(1, 2))[groups.keys.rows] for x in (key, value))
        sinks_MG = (
            None
            if sinks is None
            else sinks.detach().view(groups.num_key_heads, groups.heads_per_key)
        )
        output_PK = query_PK.new_empty(len(query_PK), value_PK.shape[1])
        kept: list[Tensor] = []
        for queries, keys, values, output in groups.split(query_PK, key_PK, value_PK, output_PK):
            for block in blocks(keys.shape[1], groups.heads_per_key, scoring):
                probabilities = block.probabilities(queries, keys, sinks_MG)
                seen = values[:, block.keys]
                output[:, block.rows] = torch.bmm(probabilities[..., : seen.shape[1]], seen)
                if _is_kept(keys):
                    kept.append(probabilities)
        ctx.save_for_backward(query_PK, key_PK, value_PK, sinks_MG, *kept)
        ctx.groups, ctx.scoring = groups, scoring
        return output_PK[groups.queries.places].view(1, query.shape[2], query.shape[1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        groups, scoring = ctx.groups, ctx.scoring
        query_PK, key_PK, value_PK, sinks_MG, *kept = ctx.saved_tensors
        rows = _rows(grad_output)
        grad_output_PK = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[
            groups.queries.rows_or_zero
        ]
        grad_query_PK = torch.empty_like(query_PK)
        # blocks add to these, so they are summed in fp32
        grad_key_PK, grad_value_PK = (
            torch.zeros_like(x, dtype=torch.float32) for x in (key_PK, value_PK)
        )
        grad_sinks_MG = (
            None if sinks_MG is None else torch.zeros_like(sinks_MG, dtype=torch.float32)
        )
        kept_blocks = iter(kept)
        for queries, keys, values, grad_o, grad_q, grad_k, grad_v in groups.split(
            query_PK, key_PK, value_PK, grad_output_PK, grad_query_PK, grad_key_PK, grad_value_PK
        ):
            for block in blocks(keys.shape[1], groups.heads_per_key, scoring):
                p = (
                    next(kept_blocks)
                    if _is_kept(keys)
                    else block.probabilities(queries, keys, sinks_MG)
                )
                seen = values[:, block.keys]
                num_seen = seen.shape[1]
                grad_v[:, block.keys] += torch.bmm(
                    p[..., :num_seen].transpose(1, 2), grad_o[:, block.rows]
                )
                grad_p = torch.bmm(grad_o[:, block.rows], seen.transpose(1, 2))
                grad_z = block.score_gradient(grad_p, p, queries, keys)
                if grad_sinks_MG is not None:
                    grad_sinks_MG += (
                        grad_z[..., -1]
                        .float()
                        .unflatten(1, (-1, sinks_MG.shape[1]))
                        .unflatten(0, (-1, len(sinks_MG)))
                        .sum((0, 2))
                    )
                grad_z = grad_z[..., :num_seen]
                grad_q[:, block.rows] = _scaled_bmm(grad_z, keys[:, block.keys], scoring.scaling)
                grad_k[:, block.keys] += _scaled_bmm(
                    grad_z.transpose(1, 2), queries[:, block.rows], scoring.scaling
                )
        num_tokens = grad_output.shape[1]
        return (
            _heads_first(grad_query_PK[groups.queries.places], num_tokens),
            _heads_first(grad_key_PK.to(key_PK.dtype)[groups.keys.places], num_tokens),
            _heads_first(grad_value_PK.to(value_PK.dtype)[groups.keys.places], num_tokens),
            None if grad_sinks_MG is None else grad_sinks_MG.flatten(),
            None,
            None,
        )


def _is_kept(keys: Tensor) -> bool:
    return keys.shape[1] <= KEEP_LENGTH


def _rows(x: Tensor) -> Tensor:
    """[1, T, heads, K] as [T * heads, K]."""
    return x.reshape(-1, x.shape[-1])


def _heads_first(rows: Tensor, num_tokens: int) -> Tensor:
    """[T * heads, K] as [1, heads, T, K]."""
    return rows.view(1, num_tokens, -1, rows.shape[-1]).transpose(1, 2)
