"""Attention over packed documents, plugged into transformers by name.

Shape suffixes: N query heads, T packed tokens, K head size; transformers passes q, k, v as [1, heads, T, K].
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.config import ConfigError
from trainer.model.cpu_attention import DocumentGroups, grouped_attention

PACKED = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE, HEAD_SIZE_STEP = 256, 8
"""What FlashAttention 2, the kernel behind `varlen_attn`, takes; other models run one call per document."""


class DocumentLengths:
    """Lengths of the packed documents on the host, in an object that `torch.compile` does not look into: it would make
    new code for every number of documents. Layers of one forward pass share it, and with it the groups.
    """

    def __init__(self, seqlens: tuple[int, ...]) -> None:
        self.seqlens = seqlens
        self._groups: dict[tuple[int, int], DocumentGroups] = {}

    def groups(self, *, num_query_heads: int, num_key_heads: int) -> DocumentGroups:
        heads = num_query_heads, num_key_heads
        if heads not in self._groups:
            self._groups[heads] = DocumentGroups(
                self.seqlens, num_query_heads=num_query_heads, num_key_heads=num_key_heads
            )
        return self._groups[heads]


def register(device_type: str | None = None) -> None:
    """Make `attn_implementation="packed"` known. No mask is registered for the name, so transformers builds none:
    causality and document bounds come from the lengths alone.

    `device_type` stands in for that of the tensors: a memory plan for a GPU runs on fake CPU tensors.
    """
    attend = packed_attention if device_type is None else partial(packed_attention, device_type=device_type)
    AttentionInterface.register(PACKED, attend)


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
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    lengths: DocumentLengths | None = None,
    device_type: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document. Returns [1, T, N, K].

    `sliding_window` W counts the token itself, as in transformers. Raises `ConfigError` for what packing cannot do.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"packed attention has no '{name}'; use model.attention=per_document")
    if attention_mask is not None or cu_seq_lens_q is None or lengths is None:
        raise ConfigError("packed attention needs document bounds and takes no mask; use model.attention=per_document")
    device_type = device_type or query.device.type
    head_size = _kernel_head_size(query, value)
    if device_type == "cuda" and not dropout and head_size <= MAX_HEAD_SIZE and query.dtype in KERNEL_DTYPES:
        output = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window, head_size)
    elif device_type == "cpu" and not dropout:
        output = _grouped(query, key, value, lengths, scaling, sliding_window)
    else:
        output = _per_document(query, key, value, lengths, scaling, sliding_window, dropout)
    return output, None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_D1: Tensor,
    max_seqlen: int,
    scaling: float | None,
    sliding_window: int | None,
    head_size: int,
) -> Tensor:
    """The kernel takes one head size for queries, keys and values: zeros behind each change no product, and those
    behind the values come out as zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    query_TNK, key_TNK, value_TNK = (
        F.pad(x[0].transpose(0, 1), (0, head_size - x.shape[-1])).contiguous() for x in (query, key, value)
    )
    output_TNK = varlen_attn(
        query_TNK,
        key_TNK,
        value_TNK,
        cu_seqlens_D1,
        cu_seqlens_D1,
        max_seqlen,
        max_seqlen,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query_TNK.shape[1] != key_TNK.shape[1],
    )
    assert isinstance(output_TNK, Tensor)
    return output_TNK[None, ..., : value.shape[-1]]


def _kernel_head_size(query: Tensor, value: Tensor) -> int:
    """The smallest that holds both and that the kernel takes."""
    return -(-max(query.shape[-1], value.shape[-1]) // HEAD_SIZE_STEP) * HEAD_SIZE_STEP


def require_kernel() -> None:
    """Raises `ConfigError` where torch's packed kernel does not take what `_varlen` gives it."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        names = ("scale", "window_size", "enable_gqa")
        inspect.signature(varlen_attn).bind(*range(7), **dict.fromkeys(names))
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"the varlen_attn of torch {torch.__version__} cannot be called as packing on CUDA needs it ({error}); "
            f"install torch 2.12 or 2.13, or set model.attention=per_document"
        ) from error


@torch.compiler.disable
def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: DocumentLengths,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    groups = lengths.groups(num_query_heads=query.shape[1], num_key_heads=key.shape[1])
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return grouped_attention(query, key, value, groups, scaling=scaling, sliding_window=sliding_window)


@torch.compiler.disable
def _per_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: DocumentLengths,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> Tensor:
    """One scaled-dot-product call per document: the reference, and the path where no packed kernel exists."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = []
    documents = zip(*(x.split(lengths.seqlens, dim=2) for x in (query, key, value)), strict=True)
    for query_D, key_D, value_D in documents:
        mask = _window_mask(query_D.shape[2], sliding_window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query_D, key_D, value_D, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < sliding_window)
