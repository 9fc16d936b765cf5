"""Records which tensor storages are alive at every moment of a training step, and their categories.

This works on real and on fake tensors. A dispatch mode sees the storages that an operation creates;
a weak reference reports when a storage is freed. The category of a storage is often known only
later (a matrix product turns out to be a gradient), so allocations are recorded first and evaluated
afterwards. Memory that a kernel allocates and frees inside one operation is not recorded, except
for fused attention.

Shape suffixes: T packed tokens, N query heads, M key heads, K head size.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.checkpoint.shards import local_tensors
from trainer.runtime.environment import pinned_bytes

PARAMETERS = "parameters"
OPTIMIZER = "optimizer state"
GATHERED = "gathered parameters"
FROZEN = "frozen parameters"
SHARDED_GRADIENTS = "sharded gradients"
GRADIENTS = "gradients being reduced"
ACTIVATIONS = "activations"
HEAD = "head: logits and loss"
HOST_INPUTS = "inputs of the layers, offloaded"
LASTING = frozenset({PARAMETERS, FROZEN, OPTIMIZER, SHARDED_GRADIENTS})
"""Categories that last beyond the step. CPU offload keeps them in host memory."""
PINNED = frozenset({PARAMETERS, FROZEN, HOST_INPUTS})
"""Categories that are page-locked if they are in host memory, each tensor in its own block."""
_HANDED_OVER = {
    "fsdp.all_gather_copy_in.default": GATHERED,
    "fsdp.chunk_cat.default": GRADIENTS,
    "c10d._reduce_scatter_base_.default": GRADIENTS,
}
"""{operation: category of its arguments}."""
FLASH_BLOCK_TOKENS = 128

Phase = tuple[int | str, ...]
Peaks = dict[Phase, Counter[str]]
"""Bytes by category at the memory peak of each phase."""


class LiveStorages(TorchDispatchMode):
    """A context in which a step runs. The caller announces each phase with `enter`."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = ()
        self._default = ACTIVATIONS
        self._events: list[tuple[int, int, Phase]] = []
        self._categories: list[str] = []
        self._living: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> "LiveStorages":
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._watched(self._resize)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def enter(self, *phase: int | str, default: str = ACTIVATIONS) -> None:
        """Begin a phase; its new storages have the category `default` until they are marked."""
        self.phase = phase
        self._default = default

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give storages a category, even those not seen before. Lasting categories are not
        replaced.
        """
        for tensor in local_tensors(list(tensors)):
            index = self._see(tensor)
            if self._categories[index] not in LASTING:
                self._categories[index] = category

    def peaks(
        self, *, elsewhere: frozenset[str] = frozenset(), pinned: frozenset[str] = frozenset()
    ) -> Peaks:
        """Return the memory peak of each phase, in order.

        Categories in `elsewhere` are stored in a different kind of memory; they count only when
        they are allocated. Categories in `pinned` are page-locked, in blocks larger than the
        tensors.
        """
        live: Counter[str] = Counter()
        sizes: Counter[int] = Counter()
        found: Peaks = {}
        for index, change_bytes, phase in self._events:
            category = self._categories[index]
            if category in pinned:
                before_bytes = pinned_bytes(sizes[index])
                sizes[index] += change_bytes
                change_bytes = pinned_bytes(sizes[index]) - before_bytes
            live[category] += change_bytes
            if phase not in found or live.total() > found[phase].total():
                found[phase] = live.copy()
            if category in elsewhere:
                live[category] -= change_bytes
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # DTensor operations are observed from outside, because inside them DTensor propagates
        # shapes on whole tensors that do not exist
        result = func(*args, **(kwargs or {}))
        for tensor in local_tensors(result):
            self._see(tensor)
        if (category := _HANDED_OVER.get(str(func))) is not None:
            self.mark(local_tensors((args, kwargs)), category)
        elif str(func) == "torch_attn._varlen_attn_backward.default":
            self._flash_backward(*args)
        return result

    def _see(self, tensor: Tensor) -> int:
        """Return the index of a local tensor's storage; record it if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            self._living[key] = len(self._categories), 0
            weakref.finalize(storage, self._freed, key).atexit = False
            self._categories.append(self._default)
            self._resized(key, storage.nbytes())
        return self._living[key][0]

    def _resized(self, key: int, size_bytes: int) -> None:
        index, before_bytes = self._living[key]
        self._events.append((index, size_bytes - before_bytes, self.phase))
        self._living[key] = index, size_bytes

    def _freed(self, key: int) -> None:
        self._resized(key, 0)
        del self._living[key]

    def _watched(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `resize_`, with which FSDP frees and refills gathered parameters, because dispatch
        modes do not see it.
        """

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._living:
                self._resized(storage._cdata, storage.nbytes())
            return result

        return resize_and_note

    def _flash_backward(self, *tensors: Any) -> None:
        _, query_TNK, key_TMK, _, _, _, cu_seqlens_D1 = tensors[:7]
        size_bytes = flash_backward_bytes(query_TNK, key_TMK, num_documents=len(cu_seqlens_D1) - 1)
        self._events += [
            (len(self._categories), change, self.phase) for change in (size_bytes, -size_bytes)
        ]
        self._categories.append(self._default)


def flash_backward_bytes(query_TNK: Tensor, key_TMK: Tensor, *, num_documents: int) -> int:
    """Return the bytes that FlashAttention 2 allocates inside its backward pass over packed
    documents.

    These are gradients of the queries in fp32, one number per row, and gradients of keys and values
    per query head if several query heads share a key head.
    """
    num_tokens, num_heads, head_size = query_TNK.shape
    num_rows = (num_tokens + FLASH_BLOCK_TOKENS * num_documents) * num_heads
    shared = 2 * num_tokens * num_heads * head_size * query_TNK.element_size()
    return 4 * num_rows * (head_size + 1) + (shared if key_TMK.shape[1] != num_heads else 0)
