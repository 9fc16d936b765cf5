"""A CUDA device without a card, for tensors without memory: what Python's side of torch asks a driver for.

`install` goes before anything that uses torch.cuda, in a process of its own: it cannot be undone.
"""

import contextlib
import ctypes
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NUM_DEVICES = 8
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, uuid="0", major=9, minor=0, multi_processor_count=132
)


class Call(NamedTuple):
    """What was asked of the driver, by which thread, and the device that this thread had set (None: never)."""

    name: str
    thread: str
    device: int | None


CALLS: list[Call] = []
_threads = threading.local()


def build(target: Path) -> Path:
    """Compile the shim against the installed torch. Raises `CalledProcessError` where its headers are others."""
    import torch

    root = Path(torch.__path__[0])
    library = target / "libfakecuda.so"
    words = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", "-o", str(library), str(SOURCE)]
    words += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return library


def _called(name: str) -> None:
    CALLS.append(Call(name, threading.current_thread().name, getattr(_threads, "device", None)))


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _called("event")

    def record(self, stream: Any = None) -> None:
        _called("event.record")

    def wait(self, stream: Any = None) -> None:
        _called("event.wait")

    def synchronize(self) -> None:
        _called("event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        _called("stream.wait_stream")

    def synchronize(self) -> None:
        _called("stream.synchronize")

    def is_capturing(self) -> bool:
        return False


def install(library: Path) -> None:
    """Make torch, in its build for CPUs, believe in eight cards. Nothing may be computed on them with real memory."""
    ctypes.CDLL(str(library))
    import torch
    import torch._dynamo  # what asks whether there is a card while it is imported must have been told the truth
    import torch._inductor.utils
    import transformers  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensorMode

    stream = Stream()

    def set_device(device: Any) -> None:
        _threads.device = torch.device(device).index if not isinstance(device, int) else device
        _called("set_device")

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: getattr(_threads, "device", None) or 0,
        "set_device": set_device,
        "get_device_name": lambda device=None: CARD.name,
        "get_device_properties": lambda device=None: CARD,
        "get_device_capability": lambda device=None: (CARD.major, CARD.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda other: contextlib.nullcontext(),
        "synchronize": lambda device=None: _called("synchronize"),
        "memory_stats": lambda device=None: defaultdict(int),
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.accelerator.current_stream = lambda device=None: stream  # type: ignore[assignment]
    # host memory stays as it is; that it is asked for is what counts
    torch.Tensor.pin_memory = lambda tensor, *args: _pinned(tensor)  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda tensor, *args: getattr(tensor, "is_fake_pinned", False)  # type: ignore[method-assign,assignment]
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment]


def _pinned(tensor: Any) -> Any:
    _called("pin_memory")
    tensor.is_fake_pinned = True
    return tensor
