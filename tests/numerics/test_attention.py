"""Packed attention against a dense masked softmax in float64.

Shape suffixes: N query heads, M key heads, T packed tokens, K head size.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.model import attention
from trainer.model.attention import DocumentLengths, packed_attention
from trainer.model.cpu_attention import Scoring

SEQLENS = (1, 7, 1, 12, 3)
T, K = sum(SEQLENS), 8


def bounds(seqlens: tuple[int, ...] = SEQLENS, device: str = "cpu") -> dict[str, Any]:
    cu_seqlens_D1 = torch.tensor((0, *seqlens), device=device).cumsum(0).to(torch.int32)
    lengths = DocumentLengths(seqlens)
    return {"cu_seq_lens_q": cu_seqlens_D1, "max_length_q": max(seqlens), "lengths": lengths}


def inputs(
    num_heads: int, num_key_heads: int, num_tokens: int = T, head_size: int = K
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_heads)
    shapes = [
        (1, heads, num_tokens, head_size) for heads in (num_heads, num_key_heads, num_key_heads)
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    """softmax(q k / sqrt(K) + mask) v over all tokens at once; [1, T, N, K]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    document_T = torch.repeat_interleave(torch.arange(len(SEQLENS)), torch.tensor(SEQLENS))
    distance_TT = torch.arange(T)[:, None] - torch.arange(T)
    visible_TT = (document_T[:, None] == document_T) & (distance_TT >= 0)
    if window is not None:
        visible_TT &= distance_TT < window
    scores = query @ key.transpose(-1, -2) * (K**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~visible_TT, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_values_and_gradients_equal_dense_attention(
    num_heads: int, num_key_heads: int, window: int | None, scaling: float | None
) -> None:
    ours = [t.requires_grad_() for t in inputs(num_heads, num_key_heads)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    output, weights = packed_attention(
        nn.Identity(),
        *ours,
        attention_mask=None,
        scaling=scaling,
        sliding_window=window,
        **bounds(),
    )
    expected = dense(*theirs, scaling=scaling, window=window)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    output.backward(direction)
    expected.backward(direction.double())
    assert weights is None and output.shape == (1, T, num_heads, K)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad is not None and reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_a_window_of_one_sees_only_itself() -> None:
    query, key, value = inputs(4, 4)
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, sliding_window=1, **bounds()
    )
    torch.testing.assert_close(output, value.transpose(1, 2))


def test_other_documents_and_later_tokens_do_not_matter_at_all() -> None:
    query, key, value = inputs(4, 2)
    output, _ = packed_attention(nn.Identity(), query, key, value, None, **bounds())
    start = 1 + 7 + 1
    for position in (start - 1, start + 6):
        key[:, :, position] += 5.0
        value[:, :, position] += 5.0
    changed, _ = packed_attention(nn.Identity(), query, key, value, None, **bounds())
    assert torch.equal(output[:, start : start + 6], changed[:, start : start + 6])
    assert not torch.equal(output[:, start + 6], changed[:, start + 6])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"attention_mask": torch.ones(1, 1, T, T, dtype=torch.bool)}, "mask"),
        ({"lengths": None}, "bounds"),
    ],
)
def test_refuses_what_it_cannot_express(arguments: dict[str, Any], name: str) -> None:
    settings = {"attention_mask": None, **bounds(), **arguments}
    with pytest.raises(ConfigError, match=f"{name}.*model.attention=per_document"):
        packed_attention(nn.Identity(), *inputs(4, 2), **settings)


def test_layers_that_are_not_handed_the_documents_find_those_of_the_forward_pass() -> None:
    tensors = inputs(4, 2)
    told, _ = packed_attention(nn.Identity(), *tensors, None, **bounds())
    with attention.documents(DocumentLengths(SEQLENS)):
        found, _ = packed_attention(nn.Identity(), *tensors, None)
    assert torch.equal(told, found)
    assert attention.running() is None


def test_a_chunk_is_a_document_of_its_own() -> None:
    """No mask is built, so the layer's type alone tells that tokens of one chunk do not see the
    one before.
    """
    module: Any = nn.Identity()
    module.layer_idx = 1
    module.config = config = SimpleNamespace(
        attention_chunk_size=5, layer_types=["full_attention", "chunked_attention"]
    )
    attention.mark_chunks(module)
    tensors = inputs(4, 2)
    chunked, _ = packed_attention(module, *tensors, None, **bounds())
    expected, _ = packed_attention(
        nn.Identity(), *tensors, None, **bounds((1, 5, 2, 1, 5, 5, 2, 3))
    )
    assert torch.equal(chunked, expected)
    module = nn.Identity()
    module.layer_idx, module.config = 0, config
    attention.mark_chunks(module)
    whole, _ = packed_attention(module, *tensors, None, **bounds())
    assert not torch.equal(chunked, whole)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("softcap", "sinks"), [(0.5, None), (None, [0.5, -1.0, 2.0, 0.0]), (0.5, [0.5, -1.0, 2.0, 0.0])]
)
def test_one_document_per_call_equals_the_groups_with_caps_and_sinks(
    softcap: float | None, sinks: list[float] | None, window: int | None
) -> None:
    """What a GPU runs in place of its kernel, against what a CPU runs, which is held against
    float64 elsewhere.
    """
    settings = {
        "softcap": softcap,
        "s_aux": None if sinks is None else torch.tensor(sinks),
        "sliding_window": window,
    }
    module = nn.Identity()
    on_cpu, _ = packed_attention(module, *inputs(4, 2), None, **settings, **bounds())
    assert attention.OBSTACLE not in vars(module)
    on_gpu, _ = packed_attention(
        module, *inputs(4, 2), None, device_type="cuda", **settings, **bounds()
    )
    torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-5, atol=1e-6)
    assert vars(module)[attention.OBSTACLE] == ("soft caps" if sinks is None else "sinks")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (8, 2)])
def test_the_packed_kernel_equals_its_twin(
    num_heads: int, num_key_heads: int, window: int | None
) -> None:
    """bf16 on CUDA: both round, so both are held against the twin in fp32, the kernel at most
    twice as far off.
    """
    seqlens = (1, 130, 5, 64)
    exact = [t.cuda() for t in inputs(num_heads, num_key_heads, sum(seqlens), 64)]
    rounded = [t.to(torch.bfloat16) for t in exact]
    results = []
    for tensors in (rounded, rounded, [t.float() for t in rounded]):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        settings = bounds(seqlens, "cuda")
        if len(results) == 1:
            output = attention._per_document(
                nn.Identity(), *leaves, settings["lengths"], Scoring(64**-0.5, window), ""
            )
        else:
            output, _ = packed_attention(
                nn.Identity(), *leaves, attention_mask=None, sliding_window=window, **settings
            )
        output.float().square().sum().backward()
        results.append(
            [output.detach().float(), *(t.grad.float() for t in leaves if t.grad is not None)]
        )
    for kernel, twin, reference in zip(*results, strict=True):
        error, twin_error = ((x - reference).norm() / reference.norm() for x in (kernel, twin))
        assert error < 2e-2 and error < 2 * twin_error + 1e-3
