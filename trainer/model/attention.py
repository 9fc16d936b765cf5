"""Attention over packed documents, registered with transformers by name.

Shape suffixes: N query heads, T packed tokens, K head size; transformers passes q, k, v as [1,
heads, T, K].
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import activate_flash_attention_impl
from torch.utils.checkpoint import noop_context_fn
from transformers import AttentionInterface

from trainer.config import ConfigError
from trainer.model.cpu_attention import DocumentGroups, Scoring, grouped_attention
from trainer.model.head_exchange import HeadExchange
from trainer.runtime.log import labelled

logger = logging.getLogger(__name__)

PACKED = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
HOPPER = 9
"""Major compute capability of the GPUs for which FlashAttention 3 is built."""
MAX_HEAD_SIZE = 256
HEAD_SIZE_STEP = 8
"""Limits of FlashAttention 2, the kernel behind `varlen_attn`."""


class DocumentLengths:
    """Lengths of the packed documents on the host.

    `torch.compile` does not trace into this object; otherwise it would recompile for every number
    of documents. All layers of a forward pass share the object, and thus its groups.
    """

    def __init__(self, seqlens: tuple[int, ...], group: ProcessGroup | None = None) -> None:
        """`group`: the ranks that share the tokens."""
        self.seqlens = seqlens
        self.exchange = None if group is None else HeadExchange(group, num_tokens=sum(seqlens))
        self.groups = cache(partial(DocumentGroups, seqlens))
        """Created once per number of key heads and device."""


_running: DocumentLengths | None = None


@torch.compiler.disable
def running() -> DocumentLengths | None:
    """Return the documents of the current forward pass, for modules that do not receive their
    lengths; None outside a forward pass.
    """
    return _running


@contextmanager
def documents(lengths: DocumentLengths | None) -> Iterator[None]:
    """Set the documents of a forward pass, for all threads: the backward pass recomputes layers in
    a different thread.
    """
    global _running
    outside = _running
    _running = lengths
    try:
        yield
    finally:
        _running = outside


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_contexts(make: Callable[[], Contexts] = noop_context_fn) -> Contexts:
    """Extend the two contexts from `make` for `torch.utils.checkpoint`, and return them.

    The first is for a layer's forward pass. The second is for its recomputation, and sets the same
    documents again.
    """
    first, second = make()
    return first, _computed_again(second, _running)


@contextmanager
def _computed_again(
    context: AbstractContextManager[Any], lengths: DocumentLengths | None
) -> Iterator[None]:
    with context, documents(lengths):
        yield


def register() -> None:
    """Make `attn_implementation="packed"` known to transformers. No mask is registered for the
    name, so transformers builds none: causality and document bounds come from the lengths alone.
    """
    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    lengths: DocumentLengths | None = None,
    device_type: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each document. Return [1, T, N, K].

    `sliding_window` W counts the token itself, as in transformers. `device_type` replaces the
    tensors' own device type, because a memory plan for a GPU runs on fake CPU tensors. Raise
    `ConfigError` for arguments that packing does not support.
    """
    if attention_mask is not None:
        raise ConfigError("packed attention takes no mask.\nFix: model.attention=per_document")
    if lengths is None or cu_seq_lens_q is None:
        lengths, cu_seq_lens_q, max_length_q = _bounds(query.device)

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, dropout)
    if (device_type or query.device.type) == "cuda" and _has_kernel(query, value, scoring):
        attend = partial(_varlen, cu_seq_lens_q, max_length_q)
    else:
        attend = partial(_grouped, lengths)
    if lengths.exchange is not None:
        return lengths.exchange.attend(attend, query, key, value, scoring), None
    return attend(query, key, value, scoring), None


@torch.compiler.disable
def _bounds(device: torch.device) -> tuple[DocumentLengths, Tensor, int]:
    """Return the current documents, their cumulative lengths on the device, and the longest length.

    Used by layers that receive no document bounds.
    """
    if _running is None:
        raise ConfigError(
            "packed attention needs document bounds.\nFix: model.attention=per_document"
        )
    seqlens = _running.seqlens
    cu_seqlens_D1 = torch.tensor((0, *seqlens)).cumsum(0).to(torch.int32)
    return _running, cu_seqlens_D1.to(device, non_blocking=True), max(seqlens)


def _has_kernel(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return True if torch's packed kernel can compute this attention."""
    has_extras = scoring.dropout or scoring.softcap is not None or scoring.sinks is not None
    fits = _kernel_head_size(query, value) <= MAX_HEAD_SIZE and query.dtype in KERNEL_DTYPES
    return fits and not has_extras


def _varlen(
    cu_seqlens_D1: Tensor,
    max_seqlen: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Call torch's kernel, which takes one head size for queries, keys and values.

    Narrower heads are padded with zeros, which change no product. The padded columns of the output
    are cut off.
    """
    from torch.nn.attention.varlen import varlen_attn

    size = _kernel_head_size(query, value)
    window = scoring.sliding_window
    # `window_size` counts the tokens to the left and right of a query, without the query itself.
    # (-1, 0) is causal attention without a window.
    query_TNK, key_TNK, value_TNK = (
        _widened(x[0].transpose(0, 1), size).contiguous() for x in (query, key, value)
    )
    output_TNK = varlen_attn(
        query_TNK,
        key_TNK,
        value_TNK,
        cu_seqlens_D1,
        cu_seqlens_D1,
        max_seqlen,
        max_seqlen,
        scale=scoring.scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_TNK.shape[1] != key_TNK.shape[1],
    )
    assert isinstance(output_TNK, Tensor)
    return output_TNK[None, ..., : value.shape[-1]]


def _widened(heads: Tensor, head_size: int) -> Tensor:
    """Pad heads with zeros. If no columns are missing, return the tensor itself: padding would copy
    it.
    """
    missing = head_size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


def _kernel_head_size(query: Tensor, value: Tensor) -> int:
    """Return the smallest head size that the kernel accepts and that holds both tensors' heads."""
    return -(-max(query.shape[-1], value.shape[-1]) // HEAD_SIZE_STEP) * HEAD_SIZE_STEP


def require_kernel() -> None:
    """Raise `ConfigError` if torch's packed kernel does not accept the arguments of `_varlen`."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        names = ("scale", "window_size", "enable_gqa")
        inspect.signature(varlen_attn).bind(*range(7), **dict.fromkeys(names))
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} lacks a varlen_attn with the arguments that packing on "
            f"CUDA needs ({error}).\nFix: install torch 2.13 to 2.15, or set "
            f"model.attention=per_document"
        ) from error


def choose_kernel() -> None:
    """Use FlashAttention 3 behind `varlen_attn` on Hopper, if its package is installed."""
    is_hopper = torch.cuda.get_device_capability()[0] == HOPPER
    if is_hopper and find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")
        logger.info(labelled("attention", "FlashAttention 3"))


@torch.compiler.disable
def _grouped(
    lengths: DocumentLengths,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
) -> Tensor:
    groups = lengths.groups(num_key_heads=key.shape[1], device=query.device)
    return grouped_attention(query, key, value, groups, scoring)
