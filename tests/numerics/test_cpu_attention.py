"""Documents side by side as batched products: against one document at a time in float64.

Shape suffixes: N query heads, M key heads, T packed tokens, K head size.
"""

import itertools

import pytest
import torch
from torch import Tensor

from trainer.model import cpu_attention as grouped
from trainer.model.cpu_attention import DocumentGroups, Scoring, grouped_attention

SEQLENS = (1, 30, 28, 7, 64, 29, 1, 17)
N, M, K = 4, 2, 16


def leaves(
    *, num_tokens: int, value_size: int = K, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, N, num_tokens, K), (1, M, num_tokens, K), (1, M, num_tokens, value_size)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    seqlens: tuple[int, ...],
    scoring: Scoring,
) -> Tensor:
    key, value = (x.repeat_interleave(N // M, dim=1) for x in (key, value))
    outputs = []
    for q, k, v in zip(*(x.split(seqlens, dim=2) for x in (query, key, value)), strict=True):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        is_seen = (distance >= 0) & (distance < (scoring.sliding_window or len(distance)))
        scores = q @ k.transpose(2, 3) * scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        weights = scores.masked_fill(~is_seen, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        outputs.append(weights / total @ v)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def errors(
    tensors: list[Tensor],
    seqlens: tuple[int, ...],
    window: int | None = None,
    softcap: float | None = None,
) -> list[float]:
    """Relative errors (Frobenius) of output and gradients of the grouped products; a fourth
    tensor is of sinks.
    """
    exact = [x.detach().double().requires_grad_() for x in tensors]
    groups = DocumentGroups(seqlens, num_query_heads=N, num_key_heads=M)
    scoring = Scoring(0.3, window, softcap, tensors[3] if len(tensors) > 3 else None)
    output = grouped_attention(*tensors[:3], groups, scoring)
    expected = one_by_one(
        *exact[:3], exact[3] if len(exact) > 3 else None, seqlens=seqlens, scoring=scoring
    )
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(
        output.dtype
    )
    output.backward(direction)
    expected.backward(direction.double())
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(tensors, exact, strict=True))]
    return [
        ((a.double() - b).norm() / b.norm()).item()
        for a, b in pairs
        if a is not None and b is not None
    ]


@pytest.mark.parametrize("window", [None, 2, 5, 64, 1000])
@pytest.mark.parametrize("keep_length", [0, 28, 1000])
@pytest.mark.parametrize("block_queries", [1, 8, 128])
def test_blocks_and_groups_change_nothing(
    monkeypatch: pytest.MonkeyPatch, block_queries: int, keep_length: int, window: int | None
) -> None:
    monkeypatch.setattr(grouped, "BLOCK_QUERIES", block_queries)
    monkeypatch.setattr(grouped, "KEEP_LENGTH", keep_length)
    found = errors(leaves(num_tokens=sum(SEQLENS)), SEQLENS, window)
    assert len(found) == 4 and max(found) < 1e-6, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("keep_length", [0, 1000])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.5, False), (None, True), (0.5, True)])
def test_caps_and_sinks_and_their_gradients(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    has_sinks: bool,
    keep_length: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(grouped, "BLOCK_QUERIES", 8)
    monkeypatch.setattr(grouped, "KEEP_LENGTH", keep_length)
    tensors = leaves(num_tokens=sum(SEQLENS), dtype=dtype)
    if has_sinks:
        tensors.append(torch.tensor([-1.0, 0.5, 2.0, 4.0]).to(dtype).requires_grad_())
    found = errors(tensors, SEQLENS, window, softcap)
    assert len(found) == 4 + has_sinks and max(found) < (
        1e-6 if dtype == torch.float32 else 2e-2
    ), found


def test_values_may_be_narrower_than_keys() -> None:
    assert max(errors(leaves(num_tokens=sum(SEQLENS), value_size=6), SEQLENS)) < 1e-6


def test_long_documents_cross_the_usual_block_and_keep_lengths() -> None:
    seqlens = (grouped.KEEP_LENGTH + 3, grouped.BLOCK_QUERIES + 1, grouped.KEEP_LENGTH)
    assert max(errors(leaves(num_tokens=sum(seqlens)), seqlens)) < 1e-6


def test_bfloat16_is_as_exact_as_rounded_inputs_allow() -> None:
    """The fused kernel, which keeps scores in fp32, is off by 1.7e-3 to 4.2e-3 on such inputs."""
    seqlens = (200, 190, 64, 300)
    assert max(errors(leaves(num_tokens=sum(seqlens), dtype=torch.bfloat16), seqlens)) < 8e-3


def test_documents_of_a_group_are_alike_and_none_is_left_out() -> None:
    groups = grouped.group_by_length(SEQLENS)
    assert sorted(itertools.chain(*groups)) == list(range(len(SEQLENS)))
    assert len(groups) < len(set(SEQLENS)), "no two lengths share a group"
    for group in groups:
        lengths = [SEQLENS[index] for index in group]
        assert lengths[0] == max(lengths) <= min(lengths) * (1 + grouped.MAX_PADDING)


def test_padding_gets_no_gradient_and_gives_none() -> None:
    """A padded place repeats the last token: its output must not count, or that token would be
    learnt from twice.
    """
    seqlens = (11, 10)
    query, key, value = leaves(num_tokens=sum(seqlens))
    groups = DocumentGroups(seqlens, num_query_heads=N, num_key_heads=M)
    assert len(groups.shapes) == 1 and len(groups.keys.rows) > sum(seqlens) * M
    output = grouped_attention(query, key, value, groups, Scoring(0.3, 1))
    output.sum().backward()
    assert value.grad is not None
    torch.testing.assert_close(value.grad, torch.full_like(value.grad, N / M))


def test_masks_that_are_kept_do_not_grow_with_the_lengths_of_documents() -> None:
    """A window that hides nothing needs no mask of its own: one for each length would fill the
    memory of a long run.
    """
    grouped._mask.cache_clear()
    keys = torch.zeros(1, 1, K)
    for length in range(1, 700):
        for block in grouped.blocks(length, 1, Scoring(0.3, sliding_window=600)):
            block.probabilities(keys.expand(1, length, K), keys.expand(1, length, K), None)
    assert grouped._mask.cache_info().currsize <= 3 * grouped.BLOCK_QUERIES
    grouped._mask.cache_clear()
