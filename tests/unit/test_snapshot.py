"""The copy that a background save writes: exact, in one block of the same size, with waits on its
own device.
"""

import mmap
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_leaves
from toy import START

from trainer.checkpoint import snapshot as module
from trainer.checkpoint.snapshot import ALIGNMENT_BYTES, HostBuffers, Snapshot
from trainer.runtime.processes import begun
from trainer.runtime.progress import History

CPU = torch.device("cpu")
CARD = torch.device("cuda", 3)


class FakeCuda:
    """The part of torch.cuda that a copy needs. Each thread begins on device 0, like CUDA threads."""

    def __init__(self, monkeypatch):
        self._current = threading.local()
        self.waits = []
        self.locked = {}
        cuda = self

        class Event:
            def synchronize(self):
                cuda.waits.append(
                    (threading.current_thread().name, getattr(cuda._current, "device", 0))
                )

        stream = SimpleNamespace(wait_stream=lambda other: None, record_event=Event)
        cudart = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._release)
        stand_ins = {
            "Stream": lambda device: stream,
            "current_stream": lambda device: None,
            "stream": lambda other: nullcontext(),
            "is_initialized": lambda: True,
            "set_device": lambda device: setattr(self._current, "device", device),
            "cudart": lambda: cudart,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _lock(self, pointer, size_bytes, flags):
        self.locked[pointer] = size_bytes
        return 0

    def _release(self, pointer):
        del self.locked[pointer]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def state():
    tied = torch.randn(33, 5)
    model = {
        "head": tied,
        "embedding": tied,
        "low": torch.randn(7).bfloat16(),
        "empty": torch.empty(0, 4),
    }
    optim = {
        "state": {"head": {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 33).t()}},
        "param_groups": [{"lr": 1e-3}],
    }
    extra = {
        "rng": torch.randint(0, 256, (5001,), dtype=torch.uint8),
        "odd": torch.tensor([float("nan"), -0.0]),
        "n": 3,
    }
    return Snapshot(
        START,
        model=model,
        optim=optim,
        extra=extra,
        data={},
        loss=None,
        grad_norm=None,
        history=History(),
    )


def all_tensors(one):
    leaves = tree_leaves([one.model, one.optim, one.extra])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_thread_waits_for_the_copy_on_the_device_of_the_state(cuda):
    """On device 0, where a thread begins, waiting would create a context of half a GiB for each of
    the other ranks.
    """
    buffers = HostBuffers(CARD)
    buffers.copy(state())
    begun(buffers.wait_until_ready).result()
    ((thread, device),) = cuda.waits
    assert thread != threading.current_thread().name and device == CARD


@pytest.mark.parametrize("device", [CPU, CARD])
def test_the_copy_is_the_state_bit_for_bit_and_shares_nothing_with_it(cuda, device):
    live = state()
    before = [bits(tensor) for tensor in all_tensors(live)]
    buffers = HostBuffers(device)
    copied = buffers.copy(live)
    assert bool(cuda.locked) == (device == CARD), "only the copies of a card are page-locked"
    for tensor in all_tensors(live):
        tensor.zero_()
    assert [bits(tensor) for tensor in all_tensors(copied)] == before
    for ours, theirs in zip(all_tensors(copied), all_tensors(live), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert copied.model["head"].data_ptr() == copied.model["embedding"].data_ptr()
    assert copied.optim["param_groups"] == [{"lr": 1e-3}] and copied.extra["n"] == 3


def test_one_block_of_the_size_of_the_state_is_page_locked_once(cuda):
    buffers = HostBuffers(CARD)
    with patch.object(module.mmap, "mmap", wraps=mmap.mmap) as allocated:
        first = buffers.copy(state())
        second = buffers.copy(state())
    ((_, block_bytes),) = (call.args for call in allocated.call_args_list)
    assert [t.data_ptr() for t in all_tensors(first)] == [t.data_ptr() for t in all_tensors(second)]
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in all_tensors(first) if tensor.nbytes}
    assert 0 <= block_bytes - sum(distinct.values()) < len(distinct) * ALIGNMENT_BYTES
    (start, size_bytes), *others = cuda.locked.items()
    assert others == [] and size_bytes == block_bytes
    for pointer, num_bytes in distinct.items():
        assert start <= pointer <= start + size_bytes - num_bytes
        assert pointer % ALIGNMENT_BYTES == 0


def test_a_forked_process_does_not_hold_the_copy():
    """A page that parent and child share is copied when it is written, but the device would
    continue to write the old page.
    """

    def is_mapped():
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        return any(int(low, 16) <= pointer < int(high, 16) for low, high in ranges)

    buffers = HostBuffers(CPU)
    pointer = buffers.copy(state()).model["head"].data_ptr()
    assert is_mapped()
    child = os.fork()
    if not child:
        os._exit(int(is_mapped()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
