"""Keeps layer inputs in host memory between the layers' forward and backward passes.

When layers are recomputed, a micro-batch keeps only their inputs: tokens x hidden size for each
layer.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainer.model.attention import checkpoint_contexts


class HostCopy:
    """A tensor that is kept in host memory until the backward pass needs it.

    On a GPU, the copies to the host and back run on a separate stream, concurrently with the
    computation. The newest tensor stays on its device until there is a newer one. By then it has
    been copied. The last tensor stays, because the backward pass needs it first.
    """

    def __init__(
        self,
        tensor: Tensor,
        before: "HostCopy | None",
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`before`: the previous copy, which the backward pass needs after this one."""
        self._device = tensor.device
        self._stream = stream
        self._before = None if before is None else weakref.ref(before)
        self._on_device: Tensor | None = tensor
        if before is not None:
            before._leave()
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        with self._beside():
            self.host.copy_(tensor, non_blocking=True)

    def get(self) -> Tensor:
        """Return the tensor on its device, and start fetching the one that is needed next."""
        tensor = self._fetch()
        self._leave()
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()
        return tensor

    def _fetch(self) -> Tensor:
        if self._on_device is None:
            self._on_device = torch.empty_like(self.host, device=self._device, pin_memory=False)
            with self._beside():
                self._on_device.copy_(self.host, non_blocking=True)
        return self._on_device

    def _leave(self) -> None:
        """Free the memory on the device. The computation first waits for the copy, because only
        then may the memory be reused.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._on_device = None

    def _beside(self) -> AbstractContextManager[object]:
        """Return a context that runs work on the copy stream, after the computation so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class HostInputs:
    """Host copies of the inputs of a model's layers. Layers are called through `checkpoint`."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: weakref.ref[HostCopy] | None = None

    @property
    def newest(self) -> HostCopy | None:
        """The last copied tensor; None once it is no longer needed."""
        return None if self._newest is None else self._newest()

    def checkpoint(self, function: Callable[..., Any], *args: object) -> Any:
        """Call `function`, keep only copies of its arguments, and call it again in the backward
        pass.
        """
        with saved_tensors_hooks(self._put_away, HostCopy.get):
            return checkpoint(function, *args, use_reentrant=False, context_fn=checkpoint_contexts)

    def _put_away(self, tensor: Tensor) -> HostCopy:
        if tensor.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        copy = HostCopy(tensor, self.newest, self._stream)
        self._newest = weakref.ref(copy)
        return copy
