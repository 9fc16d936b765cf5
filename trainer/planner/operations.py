"""What the operations of a step ask of a device: floating-point operations, bytes read and written, bytes between ranks
(floor 5).

Counted as they are dispatched, on fake tensors or real ones. A cache between the memory and the processor is not seen.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from trainer.planner.live_storage import LiveStorages, Phase, local_part, tensors_in
from trainer.planner.roofline import (
    ALL_REDUCE,
    ALL_TO_ALL,
    ATTENTION,
    COLLECTIVES,
    FROM_HOST,
    GATHER,
    MATMUL,
    MATMUL_FP32,
    MEMORY,
    ON_HOST,
    RANKS_PER_MACHINE,
    REDUCE,
    DeviceOperation,
)

_COLLECTIVES = {
    "c10d._allgather_base_.default": GATHER,
    "c10d._reduce_scatter_base_.default": REDUCE,
    "c10d.allreduce_.default": ALL_REDUCE,
    "_c10d_functional.all_to_all_single.default": ALL_TO_ALL,
}
FUSED = "fused by the compiler"

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "lift_fresh", "device"}
_NO_KERNEL |= {"wait_tensor"}
_LOOKUPS = {"embedding", "index", "gather", "index_select"}
_OVERWRITES = {"copy_", "_foreach_copy_", "zero_", "fill_"}
_NEVER_FUSED = ("fsdp", "c10d", "planner")
_FETCHES = {"_foreach_copy_", "_to_copy", "copy_", "all_gather_copy_in"}
"""What reads parameters, or inputs of layers, that are to be on the device."""


class Operations(TorchDispatchMode):
    """A context inside that of `live`, which knows the phase. With `is_compiled`, what lies between two matrix products
    of a layer is one kernel: it reads what others made and writes what outlives it.

    What is said to be in host memory is copied to the device where it is gathered; other work on it is the host's.
    """

    def __init__(self, live: LiveStorages, seqlens: Sequence[int], *, is_compiled: bool = False) -> None:
        super().__init__()
        self.counts: Counter[DeviceOperation] = Counter()
        self._live, self._seqlens, self._is_compiled = live, seqlens, is_compiled
        self._on_host = WeakIdKeyDictionary()
        """The kind of a copy from there, by storage."""
        self._region: DeviceOperation | None = None
        self._read_bytes = 0
        self._read, self._made = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        """Bytes by storage that still lives: the address of one that does not may be another's."""

    def __exit__(self, *args: Any) -> None:
        self._close()
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, phase, kind = kwargs or {}, self._live.phase, _kind(func)
        held = [tensor for tensor in tensors_in((args, kwargs)) if tensor.untyped_storage() in self._on_host]
        if kind == MEMORY and held:
            if _name(func) in _FETCHES and phase[1] != "update":
                self.count_copy(self._on_host[held[0].untyped_storage()], *held)
            else:
                kind = ON_HOST
        is_inside = kind == MEMORY and func.namespace not in _NEVER_FUSED and phase[1] != "update"
        if self._region is not None and (self._region.phase is not phase or (kind and not is_inside)):
            self._close()  # the next layer too is another phase, though it may be called the same
        result = func(*args, **kwargs)
        if kind == ON_HOST:
            self.hold(tensors_in(result))
        if kind in COLLECTIVES:
            self.counts[_collective(kind, phase, args)] += 1
        elif kind is not None:
            found = self._operation(func, kind, phase, args, kwargs, result)
            if self._is_compiled and is_inside:
                self._join(found, args, kwargs, result)
            else:
                self.counts[found] += 1
        return result

    def hold(self, tensors: Iterable[Tensor], *, fetch: str = FROM_HOST) -> None:
        """From here on these are in host memory; `fetch` is the kind of a copy from there."""
        for tensor in tensors:
            self._on_host[local_part(tensor).untyped_storage()] = fetch

    def count_copy(self, kind: str, *tensors: Tensor, phase: Phase | None = None) -> None:
        """In the phase that the step is in, or another."""
        size_bytes = sum(map(_num_bytes, tensors))
        self.counts[DeviceOperation(phase or self._live.phase, kind, kind, 0, size_bytes)] += 1

    def _operation(self, func: Any, kind: str, phase: Phase, args: Any, kwargs: Any, result: Any) -> DeviceOperation:
        name, flops = _name(func), 0
        read_bytes = sum(map(_num_bytes, tensors_in((args, kwargs))))
        read_bytes -= sum(map(_num_bytes, tensors_in([kwargs.get("out"), args[0] if name in _OVERWRITES else None])))
        if name == "all_gather_copy_in":  # gives the room of what is gathered too
            read_bytes = sum(map(_num_bytes, tensors_in(args[0])))
            return DeviceOperation(phase, name, MEMORY, 0, 2 * read_bytes)
        written = [*tensors_in(result)] or _changed(func, args, kwargs)  # what changes lists in place returns nothing
        written_bytes = sum(map(_num_bytes, written))
        size_bytes = 2 * written_bytes if name in _LOOKUPS else read_bytes + written_bytes
        if func.namespace == "torch_attn":
            flops = self._attention_flops(name, args, kwargs)
        elif name == "_grouped_mm":
            flops = 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        elif kind not in (MEMORY, ON_HOST):
            flops = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        if kind == MATMUL and written[0].dtype == torch.float32:
            kind = MATMUL_FP32
        name = name if kind == MEMORY else kind
        return DeviceOperation(phase, name, kind, flops, size_bytes)

    def _attention_flops(self, name: str, args: Any, kwargs: Any) -> int:
        """Two products forward; five backward, one of them again. Only pairs that are not masked."""
        query_TNK = args[1] if "backward" in name else args[0]
        window = kwargs.get("window_size") or next((a for a in args if isinstance(a, list) and len(a) == 2), [-1, 0])
        reach = window[0] + 1 if window[0] >= 0 else max(self._seqlens)
        pairs = sum(n * (n + 1) // 2 - max(0, n - reach) * (max(0, n - reach) + 1) // 2 for n in self._seqlens)
        return (5 if "backward" in name else 2) * 2 * pairs * query_TNK.shape[1] * query_TNK.shape[2]

    def _join(self, found: DeviceOperation, args: Any, kwargs: Any, result: Any) -> None:
        if self._region is None:
            self._region, self._read_bytes = replace(found, name=FUSED, size_bytes=0), 0
            self._read, self._made = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for tensor in tensors_in((args, kwargs)):
            storage, before_bytes = tensor.untyped_storage(), self._read.get(tensor.untyped_storage(), 0)
            if storage not in self._made and (more_bytes := _num_bytes(tensor) - before_bytes) > 0:
                self._read_bytes += more_bytes
                self._read[storage] = before_bytes + more_bytes
        for tensor in tensors_in(result):
            self._made[tensor.untyped_storage()] = _num_bytes(tensor)

    def _close(self) -> None:
        if self._region is not None:
            self.counts[replace(self._region, size_bytes=self._read_bytes + sum(self._made.values()))] += 1
            self._region = None


def _name(func: Any) -> str:
    return str(func.name()).split("::")[1].split(".")[0]


def _kind(func: Any) -> str | None:
    """None of what gives the device nothing to do: views, memory alone, questions."""
    name, aliases = _name(func), [result.alias_info for result in func._schema.returns]
    if func.namespace in ("profiler", "prim") or name in _NO_KERNEL:
        return None
    if (collective := _COLLECTIVES.get(str(func))) is not None:
        return collective
    if func.namespace == "torch_attn" or (func.overloadpacket in flop_registry and "attention" in name):
        return ATTENTION
    if func.overloadpacket in flop_registry or name == "_grouped_mm":
        return MATMUL
    return MEMORY if not aliases or any(alias is None or alias.is_write for alias in aliases) else None


def _collective(kind: str, phase: Phase, args: Any) -> DeviceOperation:
    leaves = tree_leaves(args)
    if kind == ALL_TO_ALL:  # the newer kind of operation knows its group by name
        group = _resolve_process_group(leaves[-1])
    else:
        objects = (leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
        group = ProcessGroup.unbox(next(leaf for leaf in objects if "ProcessGroup" in str(leaf._type())))
    ranks = dist.get_process_group_ranks(group)
    whole_bytes = max(map(_num_bytes, tensors_in(args)))
    if kind == ALL_REDUCE:
        whole_bytes = 2 * sum(map(_num_bytes, tensors_in(args)))
    num_machines = len({rank // RANKS_PER_MACHINE for rank in ranks})
    size_bytes = whole_bytes * (len(ranks) - 1) // len(ranks)
    return DeviceOperation(phase, kind, kind, 0, size_bytes, len(ranks) // num_machines if num_machines > 1 else 0)


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = {**kwargs, **dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))}
    written = (
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    )
    return tensors_in([given.get(name) for name in written])


def _num_bytes(tensor: Tensor) -> int:
    """What there is to read of it: an expanded tensor has less than it shows."""
    own = local_part(tensor)
    return prod(size for size, stride in zip(own.shape, own.stride(), strict=True) if stride) * own.itemsize
