"""The state of one step as it will be written, live or copied so that training may go on."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.manifest import TensorInfo
from trainer.checkpoint.shards import with_local
from trainer.protocols import Position


@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to the checkpoint of `position.step`.

    model, optim, extra: contents of this rank's files; data: of `data.pt`.
    """

    position: Position
    model: dict[str, Any]
    optim: dict[str, Any]
    extra: dict[str, Any]
    data: dict[str, Any]
    tensors: dict[str, TensorInfo]
    """Every parameter once, with its global shape, in the order of the optimizer's indices."""
    loss: float | None
    grad_norm: float | None
    best_step: int | None = None
    """Where the validation loss was lowest so far; the checkpoint of it is not rotated away."""
    episodes: tuple[tuple[int, int], ...] = ()
    """First and last step of each stretch of trouble; the newest checkpoint before the last one stays too."""


class HostBuffers:
    """Memory for one copied state, kept from save to save; page-locked when the state lives on a GPU.

    On a GPU the copies are queued on the current stream: they see the parameters as they are now, whatever is queued
    later, and `ready` says when they are done.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self.ready: torch.cuda.Event | None = None

    def copy(self, snapshot: Snapshot) -> Snapshot:
        seen: dict[tuple[Any, ...], Tensor] = {}
        parts = ("model", "optim", "extra")
        copied = replace(snapshot, **{part: self._copied(getattr(snapshot, part), (part,), seen) for part in parts})
        if torch.cuda.is_initialized():
            self.ready = torch.cuda.Event()
            self.ready.record()
        return copied

    def wait_until_ready(self) -> None:
        """Block the calling thread, not the device, until the last copy is complete."""
        if self.ready is not None:
            self.ready.synchronize()

    def _copied(self, value: Any, key: tuple[Any, ...], seen: dict[tuple[Any, ...], Tensor]) -> Any:
        if isinstance(value, DTensor):
            return with_local(value, self._copied(value._local_tensor, key, seen))
        if isinstance(value, Tensor):
            # what shares memory, as a tied head does, shares its copy
            memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if memory not in seen:
                seen[memory] = self._buffer(value, key)
                seen[memory].copy_(value, non_blocking=True)
            return seen[memory]
        if isinstance(value, dict):
            return {name: self._copied(item, (*key, name), seen) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(item, (*key, index), seen) for index, item in enumerate(value))
        return value

    def _buffer(self, value: Tensor, key: tuple[Any, ...]) -> Tensor:
        found = self._buffers.get(key)
        if found is None or found.shape != value.shape or found.dtype != value.dtype:
            found = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[key] = found
        return found
