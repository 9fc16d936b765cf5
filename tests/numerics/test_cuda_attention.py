"""Tests of packed attention for a GPU, without a GPU.

A stand-in replaces torch's kernel, requires the arguments of the real kernel, and computes in
float32, document by document.

Shape suffixes: N query heads, M key heads, T packed tokens, K head size.
"""

import inspect
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from kernel_terms import insist
from test_attention import SEQLENS, bounds, dense, errors, inputs
from torch import nn
from torch.nn.attention import varlen
from toy import build
from toy_runs import source as source  # a fixture

from trainer.config import ConfigError
from trainer.model import attention, parallelize
from trainer.model.attention import packed_attention


class Kernel:
    """Stands in for `varlen_attn`; counts its calls."""

    def __init__(self):
        self.num_calls = 0
        self.__signature__ = inspect.signature(varlen.varlen_attn)

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        given = self.__signature__.bind(*args, **kwargs).arguments
        query, key, value = (given[name] for name in ("query", "key", "value"))
        bounds, (left, _) = (given["cu_seq_q"], given["cu_seq_k"]), given["window_size"]
        insist(
            query, key, value, *bounds, window=given["window_size"], enable_gqa=given["enable_gqa"]
        )
        seqlens = given["cu_seq_q"].diff().tolist()
        assert given["max_q"] == given["max_k"] == max(seqlens) and sum(seqlens) == len(query)
        window = None if left == -1 else left + 1
        heads = (x.float().transpose(0, 1)[None] for x in (query, key, value))
        found = dense(*heads, seqlens=seqlens, scaling=given["scale"], window=window)
        return found[0].to(query.dtype)


@contextmanager
def on_cuda():
    """Make packed attention treat its tensors as GPU tensors."""
    kernel = Kernel()
    as_cuda = partial(packed_attention, device_type="cuda")
    with (
        patch.object(varlen, "varlen_attn", kernel),
        patch.object(attention, "packed_attention", as_cuda),
    ):
        yield kernel


SQUARE_SIZES = [(size, size) for size in (20, 64, 256, 264)]
SIZES = [*SQUARE_SIZES, (192, 128), (12, 8), (8, 12), (252, 256), (288, 32)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_head_sizes_that_the_kernel_lacks_give_the_same_numbers(sizes, window):
    """Values narrower than queries (MLA), sizes that are not multiples of 8, and sizes above 256."""
    with on_cuda() as kernel:
        found = errors(inputs(sizes=sizes, dtype=torch.bfloat16), window=window)
    assert kernel.num_calls == (max(sizes) <= 256)
    assert max(found) < 1e-2


@pytest.mark.parametrize("extra", [{"softcap": 0.5}, {"s_aux": torch.ones(4)}, {"dropout": 0.5}])
def test_what_the_kernel_lacks_runs_without_it(extra):
    with on_cuda() as kernel:
        tensors = inputs(dtype=torch.bfloat16)
        attention.packed_attention(nn.Identity(), *tensors, None, **extra, **bounds(SEQLENS))
    assert kernel.num_calls == 0


def test_a_kernel_with_another_signature_is_refused_before_anything_is_built(source):
    def of_torch_2_10(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
    ):
        raise AssertionError("called")

    world = SimpleNamespace(device=torch.device("cuda"))
    with (
        patch.object(varlen, "varlen_attn", of_torch_2_10),
        patch.object(parallelize, "parallelize", side_effect=AssertionError("built")),
        pytest.raises(
            ConfigError,
            match=r"(?s)varlen_attn.*'scale'.*install torch 2.13.*model.attention=per_document",
        ),
    ):
        build(world, source)


@pytest.mark.parametrize(
    ("capability", "is_installed", "expected"),
    [((9, 0), True, ["FA3"]), ((9, 0), False, []), ((8, 0), True, []), ((10, 0), True, [])],
)
def test_flash_attention_3_is_used_on_hopper_where_it_is_installed(
    monkeypatch, capability, is_installed, expected
):
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention, "find_spec", lambda name: name if is_installed else None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    attention.choose_kernel()
    assert activated == expected
