"""Packed attention as batched matrix products, for CPUs and for features that the GPU kernel lacks.

torch's fused CPU kernel takes one document at a time, and its backward pass dominates a step of a
small model. Here each group of documents, padded to the longest, is one batch. Queries are
processed in blocks, each with only the keys that they may see. Scores are rounded to the compute
dtype before the softmax, as in transformers' eager attention.

Shape suffixes: N query heads, M key heads, G = N / M query heads that share one key head, T packed
tokens, D documents of a group, L its padded length, P places (key heads and padded tokens of all
groups), B queries of a block, C keys they may see, K head size.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

BLOCK_QUERIES = 128
MAX_PADDING = 0.1
"""A group's longest document exceeds its shortest by at most this share."""
KEEP_LENGTH = 512
"""Probabilities of documents up to this length are kept for the backward pass. For longer documents
they are recomputed, which keeps memory linear in the length.
"""
NUM_MASKS = 128
"""Masks to keep for the next layers. Documents of different lengths need different ones."""


@dataclass(frozen=True)
class Scoring:
    """Settings that turn query-key scores into attention weights."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    """A cap c turns each score into c * tanh(score / c)."""
    sinks: Tensor | None = None
    """[N]: an extra score per head in the softmax, like the score of a key without a value."""
    dropout: float = 0.0


class DocumentGroups:
    """Map the rows (token * M + key head) of a micro-batch to places in padded batches."""

    def __init__(
        self,
        seqlens: tuple[int, ...],
        *,
        num_key_heads: int,
        device: torch.device,
    ) -> None:
        """Divide documents of these lengths into groups, and compute the place of each row once for
        all layers.
        """
        members = group_by_length(seqlens)
        num_tokens = sum(seqlens)
        num_rows = num_tokens * num_key_heads
        documents = torch.arange(num_tokens).split(seqlens)
        head_M1 = torch.arange(num_key_heads)[:, None]
        rows = []
        for group in members:
            token_DL = pad_sequence(
                [documents[index] for index in group], batch_first=True, padding_value=num_tokens
            )
            rows.append((token_DL[:, None] * num_key_heads + head_M1).flatten())
        rows_P = torch.cat(rows)
        self.num_key_heads = num_key_heads
        self.batch_sizes = [len(group) * num_key_heads for group in members]
        """D * M of each group."""
        self._num_places = [len(places) for places in rows]
        self.places = _sent(rows_P.argsort()[:num_rows], device)
        """The place of each row."""
        rows_P = _sent(rows_P, device)
        self.rows = rows_P.clamp(max=num_rows - 1)
        """The row at each place. A padded place repeats the last row; no result depends on it."""
        self.rows_or_zero = rows_P.clamp(max=num_rows)
        """The row at each place; padded places take the row after the last, which holds zeros."""

    def split(self, *placed: Tensor) -> Iterator[list[Tensor]]:
        """Yield views of each group: queries [P, G, K] as [D * M, L * G, K], keys [P, 1, K] as [D *
        M, L, K].
        """
        by_group = zip(*(tensor.split(self._num_places) for tensor in placed), strict=True)
        for batch_size, tensors in zip(self.batch_sizes, by_group, strict=True):
            yield [tensor.view(batch_size, -1, tensor.shape[-1]) for tensor in tensors]


def _sent(index: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting."""
    if device.type == "cuda":
        index = index.pin_memory()
    return index.to(device, non_blocking=True)


def group_by_length(seqlens: tuple[int, ...]) -> list[list[int]]:
    """Return indices of documents, longest first, in groups of similar length."""
    groups: list[list[int]] = []
    for index in sorted(range(len(seqlens)), key=lambda i: -seqlens[i]):
        if groups and seqlens[groups[-1][0]] <= seqlens[index] * (1 + MAX_PADDING):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of every document of a group. They see keys from `first_key` on."""

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

    def probabilities(
        self,
        queries: Tensor,
        keys: Tensor,
        sinks_MG: Tensor | None,
    ) -> Tensor:
        """Return the softmax over the keys that each query may see, [D * M, B * G, C], with an
        extra column for sinks.
        """
        scores = self._scores(queries, keys)
        num_queries = self.last - self.first
        # all queries of the block see all keys before it, unless a window hides some
        window = self.scoring.sliding_window
        first_masked = self.first if window is None or self.last <= window else self.first_key
        scores[:, :, first_masked - self.first_key :] += _mask(
            num_queries,
            self.last - first_masked,
            self.heads_per_key,
            window,
            queries.dtype,
            queries.device,
        )
        if sinks_MG is not None:
            column = sinks_MG.to(scores.dtype).repeat(len(scores) // len(sinks_MG), num_queries)
            scores = torch.cat([scores, column[..., None]], -1)
        return torch.softmax(scores, -1)

    def score_gradient(
        self,
        grad_p: Tensor,
        p: Tensor,
        queries: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """Return the gradient of the scores, given `p` and its gradient. `grad_p` has no column for
        sinks, because sinks have no value.
        """
        num_keys = grad_p.shape[2]
        grad_p = F.pad(grad_p, (0, p.shape[2] - num_keys))
        grad = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        if self.scoring.softcap is not None:
            tanh = self._scores(queries, keys) / self.scoring.softcap
            grad[..., :num_keys] *= 1 - tanh.square_()
        return grad

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        keys = keys[:, self.keys].transpose(1, 2)
        scores = _scaled_bmm(queries[:, self.rows], keys, self.scoring.scaling)
        cap = self.scoring.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def blocks(length: int, heads_per_key: int, scoring: Scoring) -> Iterator[Block]:
    """Yield the blocks of queries for documents of one padded length, in order."""
    window = scoring.sliding_window
    for first in range(0, length, BLOCK_QUERIES):
        first_key = 0 if window is None else max(0, first - window + 1)
        yield Block(first, min(first + BLOCK_QUERIES, length), first_key, heads_per_key, scoring)


@functools.lru_cache(maxsize=NUM_MASKS)
def _mask(
    num_queries: int,
    num_keys: int,
    heads_per_key: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return [B * G, C] with 0 where a query sees a key and -inf elsewhere. The last query is at
    the position of the last key.
    """
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    keys = torch.arange(num_keys, device=device)
    distances = positions.repeat_interleave(heads_per_key)[:, None] - keys
    is_hidden = (distances < 0) | (distances >= (sliding_window or num_keys))
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(is_hidden, float("-inf"))


def _scaled_bmm(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right, scaled before it is rounded."""
    # with beta = 0, the first argument is ignored, even if it is NaN
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: DocumentGroups,
    scoring: Scoring,
) -> Tensor:
    """Compute causal attention of queries [1, N, T, K] over keys and values [1, M, T, K]. Return
    [1, T, N, K].
    """
    return _GroupedAttention.apply(query, key, value, scoring.sinks, groups, scoring)


class _GroupedAttention(torch.autograd.Function):
    """Attention and its gradient.

    Forward: p = softmax(s q k^T), o = p v. Backward: dv = p^T do, dz = p * (dp - rowsum(p * dp))
    with dp = do v^T, dq = s dz k, dk = s dz^T q. The soft cap c * tanh(z / c) has the gradient 1 -
    tanh(z / c)^2. Dropout multiplies p and dp by the same noise.
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
        """Compute attention by group and block.

        Probabilities of short documents are kept for the backward pass, which recomputes the
        others. Returns [1, T, N, K].
        """
        num_query_heads, num_tokens = query.shape[1:3]
        query_PGK, key_P1K, value_P1K = (
            _rows(x.transpose(1, 2), groups)[groups.rows] for x in (query, key, value)
        )
        heads_per_key = query_PGK.shape[1]
        sinks_MG = None if sinks is None else sinks.detach().view(-1, heads_per_key)
        output_PGK = query_PGK.new_empty(*query_PGK.shape[:2], value.shape[-1])
        # of each block in order: the probabilities of short documents, and the noise of dropout
        kept: list[Tensor] = []
        for queries, keys, values, output in groups.split(
            query_PGK, key_P1K, value_P1K, output_PGK
        ):
            for block in blocks(keys.shape[1], heads_per_key, scoring):
                p = block.probabilities(queries, keys, sinks_MG)
                if _is_kept(keys):
                    kept.append(p)
                seen = values[:, block.keys]
                weights = p[..., : seen.shape[1]]
                if scoring.dropout:
                    noise = F.dropout(torch.ones_like(weights), scoring.dropout)
                    kept.append(noise)
                    weights = weights * noise
                output[:, block.rows] = torch.bmm(weights, seen)
        ctx.save_for_backward(query_PGK, key_P1K, value_P1K, sinks_MG, *kept)
        ctx.groups = groups
        ctx.scoring = scoring
        return output_PGK[groups.places].view(1, num_tokens, num_query_heads, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks.

        Gradients of keys, values and sinks are sums over blocks, in float32.
        """
        groups = ctx.groups
        scoring = ctx.scoring
        query_PGK, key_P1K, value_P1K, sinks_MG, *kept = ctx.saved_tensors
        heads_per_key = query_PGK.shape[1]
        # padded queries get a gradient of zero, so they add nothing to those of keys and values
        rows = _rows(grad_output, groups)
        grad_output_PGK = torch.cat([rows, torch.zeros_like(rows[:1])])[groups.rows_or_zero]
        grad_query_PGK = torch.empty_like(query_PGK)
        # sums over blocks, in float32
        grad_key_P1K = torch.zeros_like(key_P1K, dtype=torch.float32)
        grad_value_P1K = torch.zeros_like(value_P1K, dtype=torch.float32)
        grad_sinks_MG = None
        if sinks_MG is not None:
            grad_sinks_MG = torch.zeros_like(sinks_MG, dtype=torch.float32)
        kept_in_order = iter(kept)
        for queries, keys, values, grad_o, grad_q, grad_k, grad_v in groups.split(
            query_PGK,
            key_P1K,
            value_P1K,
            grad_output_PGK,
            grad_query_PGK,
            grad_key_P1K,
            grad_value_P1K,
        ):
            for block in blocks(keys.shape[1], heads_per_key, scoring):
                if _is_kept(keys):
                    p = next(kept_in_order)
                else:
                    p = block.probabilities(queries, keys, sinks_MG)
                seen = values[:, block.keys]
                num_seen = seen.shape[1]
                weights = p[..., :num_seen]
                grad_p = torch.bmm(grad_o[:, block.rows], seen.transpose(1, 2))
                if scoring.dropout:
                    noise = next(kept_in_order)
                    weights = weights * noise
                    grad_p = grad_p * noise
                grad_v[:, block.keys] += torch.bmm(weights.transpose(1, 2), grad_o[:, block.rows])
                grad_z = block.score_gradient(grad_p, p, queries, keys)
                if sinks_MG is not None:
                    # [D, M, B, G] of [D * M, B * G]
                    by_query = grad_z[..., -1].float().unflatten(1, (-1, heads_per_key))
                    grad_sinks_MG += by_query.unflatten(0, (-1, len(sinks_MG))).sum((0, 2))
                grad_z = grad_z[..., :num_seen]
                grad_q[:, block.rows] = _scaled_bmm(grad_z, keys[:, block.keys], scoring.scaling)
                grad_k[:, block.keys] += _scaled_bmm(
                    grad_z.transpose(1, 2), queries[:, block.rows], scoring.scaling
                )
        grads = (grad_query_PGK, grad_key_P1K.to(key_P1K.dtype), grad_value_P1K.to(value_P1K.dtype))
        heads_first = (
            grad[groups.places].view(*grad_output.shape[:2], -1, grad.shape[-1]).transpose(1, 2)
            for grad in grads
        )
        return (
            *heads_first,
            None if grad_sinks_MG is None else grad_sinks_MG.flatten(),
            None,
            None,
        )


def _is_kept(keys: Tensor) -> bool:
    return keys.shape[1] <= KEEP_LENGTH


def _rows(x: Tensor, groups: DocumentGroups) -> Tensor:
    """Reshape [1, T, N, K] to [T * M, G, K]."""
    heads_per_key = x.shape[2] // groups.num_key_heads
    return x.reshape(-1, heads_per_key, x.shape[3])
