"""The state of one step for a save: either live, or copied so that training can continue."""

import mmap
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from trainer.checkpoint.shards import StateDict, local_tensors, with_local
from trainer.runtime.progress import History, Position

ALIGNMENT_BYTES = 64
"""Alignment of each tensor, as torch aligns host memory."""
PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of the checkpoint of `position.step`.

    model, optim, extra: contents of this rank's files; data: contents of `data.pt`.
    """

    position: Position
    model: StateDict
    optim: StateDict
    extra: StateDict
    data: StateDict
    loss: float | None
    grad_norm: float | None
    history: History


class HostBuffers:
    """Host memory for one copy of the state, reused for every save.

    It is a single block of exactly the needed size, page-locked if the state is on a GPU. torch
    would round page-locked allocations up to powers of two, which can double the size. Copies from
    a GPU run on a separate stream, in parallel with the computation. Forward and backward passes do
    not change the state, and an update waits for the copies.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the device that holds the state; the CPU if the state is offloaded to it."""
        self._device = device
        self._buffers: list[Tensor] = []
        self._locked: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        self._copied: list[Tensor] = []
        """Tensors kept alive until their copies are complete, because some are not referenced
        elsewhere.
        """

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of its tensors.

        On a GPU the copies run on their own stream; `wait_until_ready` waits for them.
        """
        parts = {part: getattr(snapshot, part) for part in ("model", "optim", "extra")}
        live = {_memory(tensor): tensor for tensor in local_tensors(parts)}
        shapes = [(tensor.dtype, tensor.shape) for tensor in live.values()]
        if shapes != [(buffer.dtype, buffer.shape) for buffer in self._buffers]:
            self._allocate(shapes)
        copies = dict(zip(live, self._buffers, strict=True))
        if self._device.type == "cuda":
            # The copies start once the computation that is already queued is done.
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for memory, tensor in live.items():
                copies[memory].copy_(tensor, non_blocking=True)
        if self._stream is not None:
            self._ready = self._stream.record_event()
            self._copied = list(live.values())

        def copy_of(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                return with_local(tensor, copies[_memory(tensor._local_tensor)])
            return copies[_memory(tensor)]

        return replace(snapshot, **tree_map_only(Tensor, copy_of, parts))

    def wait_until_ready(self) -> None:
        """Block the calling thread, not the device, until the last copy is complete."""
        if self._ready is not None:
            # A new thread starts on device 0, and would create a CUDA context on it.
            torch.cuda.set_device(self._device)
            self._ready.synchronize()
            self._copied = []

    def before_update(self) -> None:
        """Make the device, not the host, wait for the last copy."""
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)

    def _allocate(self, shapes: list[tuple[torch.dtype, torch.Size]]) -> None:
        self._buffers = []
        if self._locked is not None:
            _check(torch.cuda.cudart().cudaHostUnregister(self._locked.data_ptr()), "released")
            self._locked = None
        starts = []
        size_bytes = 0
        for dtype, shape in shapes:
            starts.append(size_bytes)
            num_units = -(-shape.numel() * dtype.itemsize // ALIGNMENT_BYTES)
            size_bytes += num_units * ALIGNMENT_BYTES
        block = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Loader workers that are forked after a rollback do not need the block.
        block.madvise(mmap.MADV_DONTFORK)
        if self._device.type == "cuda":
            whole = torch.frombuffer(block, dtype=torch.uint8)
            register = torch.cuda.cudart().cudaHostRegister
            _check(register(whole.data_ptr(), whole.nbytes, PORTABLE), "page-locked")
            self._locked = whole
        self._buffers = [
            _tensor_in(block, start, *kind) for start, kind in zip(starts, shapes, strict=True)
        ]


def _check(status: Any, action: str) -> None:
    if int(status) != 0:
        raise RuntimeError(
            f"host memory for background saves could not be {action} (cudaError {int(status)}).\n"
            "Fix: trainer.checkpoint.async_save=false"
        )


def _tensor_in(
    block: mmap.mmap,
    start: int,
    dtype: torch.dtype,
    shape: torch.Size,
) -> Tensor:
    """Return a tensor whose storage has exactly its size. `torch.save` writes whole storages."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(
        block,
        dtype=dtype,
        count=shape.numel(),
        offset=start,
    ).view(shape)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with shared memory, such as a tied head."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
