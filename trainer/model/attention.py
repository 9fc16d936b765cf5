"""Attention over packed documents, plugged into transformers by name.

Shape suffixes: N query heads, T packed tokens, K head size; transformers passes q, k, v as [1,
heads, T, K].
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import noop_context_fn
from transformers import AttentionInterface

from trainer.config import ConfigError
from trainer.model.cpu_attention import DocumentGroups, Scoring, grouped_attention
from trainer.model.head_exchange import HeadExchange

PACKED = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE, HEAD_SIZE_STEP = 256, 8
"""What FlashAttention 2, the kernel behind `varlen_attn`, takes; other models run one call per
document.
"""
OBSTACLE = "_one_document_per_call"
"""Attribute of attention modules that says why they do, once they did."""


CHUNK_SIZE = "_packed_chunk_size"


class DocumentLengths:
    """Lengths of the packed documents on the host, in an object that `torch.compile` does not look
    into: it would make new code for every number of documents. Layers of one forward pass share it,
    and with it the groups.
    """

    def __init__(self, seqlens: tuple[int, ...], group: ProcessGroup | None = None) -> None:
        """`group`: the ranks that hold the tokens between them."""
        self.seqlens = seqlens
        self.exchange = None if group is None else HeadExchange(group, num_tokens=sum(seqlens))
        self._groups: dict[tuple[int, int], DocumentGroups] = {}
        self._chunks: dict[int, DocumentLengths] = {}

    def groups(self, *, num_query_heads: int, num_key_heads: int) -> DocumentGroups:
        heads = num_query_heads, num_key_heads
        if heads not in self._groups:
            self._groups[heads] = DocumentGroups(
                self.seqlens, num_query_heads=num_query_heads, num_key_heads=num_key_heads
            )
        return self._groups[heads]

    def chunks(self, size: int) -> "DocumentLengths":
        """Of the same tokens where each sees those of its chunk alone, as if they were
        documents.
        """
        if size not in self._chunks:
            pieces = (
                min(size, length - start)
                for length in self.seqlens
                for start in range(0, length, size)
            )
            self._chunks[size] = chunks = DocumentLengths(tuple(pieces))
            chunks.exchange = self.exchange
        return self._chunks[size]

    def cu_seqlens(self, device: torch.device) -> Tensor:
        return (
            torch.tensor((0, *self.seqlens)).cumsum(0).to(torch.int32).to(device, non_blocking=True)
        )


_running: DocumentLengths | None = None


@torch.compiler.disable
def running() -> DocumentLengths | None:
    """The documents of the forward pass that runs, for modules that are not handed their
    lengths; None outside.
    """
    return _running


@contextmanager
def documents(lengths: DocumentLengths | None) -> Iterator[None]:
    """Around a forward pass over these. Not by thread: the backward pass computes layers again
    in one of its own.
    """
    global _running
    outside, _running = _running, lengths
    try:
        yield
    finally:
        _running = outside


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_contexts(make: Callable[[], Contexts] = noop_context_fn) -> Contexts:
    """For `torch.utils.checkpoint`, around what `make` gives: of a layer's forward pass, and of its
    second in the backward pass, which must find the documents of the first.
    """
    first, second = make()
    return first, _computed_again(second, _running)


@contextmanager
def _computed_again(
    context: AbstractContextManager[Any], lengths: DocumentLengths | None
) -> Iterator[None]:
    with context, documents(lengths):
        yield


def mark_chunks(model: nn.Module) -> None:
    """Layers in which only the tokens of a chunk see each other: nothing but the mask, not
    built here, would say so.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        layer_types, index = (
            getattr(config, "layer_types", None) or (),
            getattr(module, "layer_idx", None),
        )
        if (
            index is not None
            and index < len(layer_types)
            and layer_types[index] == "chunked_attention"
        ):
            setattr(module, CHUNK_SIZE, config.attention_chunk_size)


def register(device_type: str | None = None) -> None:
    """Make `attn_implementation="packed"` known. No mask is registered for the name, so
    transformers builds none: causality and document bounds come from the lengths alone.

    `device_type` stands in for that of the tensors: a memory plan for a GPU runs on fake CPU
    tensors.
    """
    attend = (
        packed_attention
        if device_type is None
        else partial(packed_attention, device_type=device_type)
    )
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    lengths: DocumentLengths | None = None,
    device_type: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document. Returns [1, T, N, K].

    `sliding_window` W counts the token itself, as in transformers. Raises `ConfigError` for what
    packing cannot do.
    """
    if attention_mask is not None:
        raise ConfigError("packed attention takes no mask; use model.attention=per_document")
    device_type = device_type or query.device.type
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    chunk_size: int | None = getattr(module, CHUNK_SIZE, None)
    if chunk_size is not None or lengths is None or cu_seq_lens_q is None:
        documents, cu_seqlens_D1, max_seqlen = _bounds(lengths, chunk_size, query.device)
    else:
        documents, cu_seqlens_D1, max_seqlen = lengths, cu_seq_lens_q, max_length_q

    attend = partial(_attend, module, documents, cu_seqlens_D1, max_seqlen, device_type)
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, dropout)
    if documents.exchange is not None:
        return documents.exchange.attend(attend, query, key, value, scoring), None
    return attend(query, key, value, scoring), None


def _attend(
    module: nn.Module,
    documents: DocumentLengths,
    cu_seqlens_D1: Tensor,
    max_seqlen: int,
    device_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
) -> Tensor:
    obstacle = _obstacle(query, value, scoring, device_type)
    if obstacle is not None:
        return _per_document(module, query, key, value, documents, scoring, obstacle)
    if device_type == "cuda":
        return _varlen(query, key, value, cu_seqlens_D1, max_seqlen, scoring)
    return _grouped(query, key, value, documents, scoring)


@torch.compiler.disable
def _bounds(
    lengths: DocumentLengths | None, chunk_size: int | None, device: torch.device
) -> tuple[DocumentLengths, Tensor, int]:
    """Documents, their cumulative lengths on the device, the longest: for layers that are not
    handed any, and for chunks, which are documents by themselves.
    """
    if lengths is None and (lengths := _running) is None:
        raise ConfigError(
            "packed attention needs document bounds; use model.attention=per_document"
        )
    if chunk_size is not None:
        lengths = lengths.chunks(chunk_size)
    return lengths, lengths.cu_seqlens(device), max(lengths.seqlens)


def _obstacle(query: Tensor, value: Tensor, scoring: Scoring, device_type: str) -> str | None:
    """Why one call cannot take all documents, or None."""
    if scoring.dropout:
        return "dropout"
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"no kernel for {device_type}"
    if scoring.softcap is not None or scoring.sinks is not None:
        return "soft caps" if scoring.sinks is None else "sinks"
    if _kernel_head_size(query, value) > MAX_HEAD_SIZE:
        return f"heads above {MAX_HEAD_SIZE}"
    return None if query.dtype in KERNEL_DTYPES else f"{query.dtype}"


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_D1: Tensor,
    max_seqlen: int,
    scoring: Scoring,
) -> Tensor:
    """The kernel takes one head size for queries, keys and values: zeros behind each change no
    product, and those behind the values come out as zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    size, window = _kernel_head_size(query, value), scoring.sliding_window
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
    """With zeros behind; to add none would be a copy all the same."""
    missing = head_size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


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
            f"the varlen_attn of torch {torch.__version__} cannot be called as packing on CUDA "
            f"needs it ({error}); install torch 2.13 to 2.15, or set model.attention=per_document"
        ) from error


@torch.compiler.disable
def _grouped(
    query: Tensor, key: Tensor, value: Tensor, lengths: DocumentLengths, scoring: Scoring
) -> Tensor:
    groups = lengths.groups(num_query_heads=query.shape[1], num_key_heads=key.shape[1])
    return grouped_attention(query, key, value, groups, scoring)


@torch.compiler.disable
def _per_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: DocumentLengths,
    scoring: Scoring,
    obstacle: str,
) -> Tensor:
    """One scaled-dot-product call per document: the reference, and the path where no packed
    kernel exists.
    """
    vars(module)[OBSTACLE] = obstacle
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    is_plain = scoring.softcap is None and scoring.sinks is None
    outputs = []
    documents = zip(*(x.split(lengths.seqlens, dim=2) for x in (query, key, value)), strict=True)
    for query_D, key_D, value_D in documents:
        mask = _mask(query_D.shape[2], scoring.sliding_window, query.device, is_needed=not is_plain)
        if mask is not None and not is_plain:
            outputs.append(_spelled_out(query_D, key_D, value_D, mask, scoring))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                query_D,
                key_D,
                value_D,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scoring.scaling,
                dropout_p=scoring.dropout,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _mask(
    length: int, sliding_window: int | None, device: torch.device, *, is_needed: bool
) -> Tensor | None:
    """Which keys each query sees; None for all up to itself, unless it is needed."""
    if not is_needed and (sliding_window is None or length <= sliding_window):
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (sliding_window or length))


def _spelled_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """With soft caps and sinks, which no fused call takes, as in transformers' eager attention."""
    products = query @ key.transpose(2, 3) * scoring.scaling
    if scoring.softcap is not None:
        products = torch.tanh(products / scoring.softcap) * scoring.softcap
    products = products.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(products.dtype)[None, :, None, None].expand(*products.shape[:3], 1)
        products = torch.cat([products, sinks], dim=-1)
    weights = torch.softmax(products, dim=-1, dtype=torch.float32).to(query.dtype)[
        ..., : key.shape[2]
    ]
    return F.dropout(weights, scoring.dropout) @ value
