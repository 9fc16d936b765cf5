"""A CUDA device without a GPU, for tensors without memory. It provides the parts of a driver that
torch's Python code uses.

Call `install` before anything uses torch.cuda, in a separate process, because it cannot be undone.
"""

import contextlib
import ctypes
import itertools
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NUM_DEVICES = 8
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 * 2**30,
    uuid="0",
    major=9,
    minor=0,
    multi_processor_count=132,
)


class Call(NamedTuple):
    """A driver call, with its thread and the device that this thread had set (None: never set)."""

    name: str
    thread: str
    device: int | None
    stream: int
    """The stream of this thread: 0 for the device's default stream, or a created one."""
    subject: int | None = None
    """The number of the stream or event that the call concerns."""


CALLS = []
PINNED = None
"""Page-locked memory of single tensors."""
LOCKED = {}
"""Page-locked host memory: start address and size in bytes."""
_threads = threading.local()
_numbers = itertools.count(1)


def build(target):
    """Compile the shim against the installed torch. Raises `CalledProcessError` if its headers
    differ.
    """
    import torch

    root = Path(torch.__path__[0])
    library = target / "libfakecuda.so"
    words = [
        "g++",
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{root / 'include'}",
        "-o",
        str(library),
        str(SOURCE),
    ]
    words += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return library


def called(name, subject=None):
    device = getattr(_threads, "device", None)
    stream = getattr(_threads, "stream", DEFAULT)
    CALLS.append(Call(name, threading.current_thread().name, device, stream.number, subject))


class Event:
    def __init__(self, *args, **kwargs):
        self.number = next(_numbers)

    def record(self, stream=None):
        with on(stream):
            called("event.record", self.number)

    def wait(self, stream=None):
        with on(stream):
            called("event.wait", self.number)

    def synchronize(self):
        called("event.synchronize", self.number)

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


class Stream:
    def __init__(self, *args, **kwargs):
        self.number = next(_numbers)

    @property
    def device(self):
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        with on(self):
            called("stream.wait_stream", stream.number)

    def synchronize(self):
        called("stream.synchronize", self.number)

    def is_capturing(self):
        return False


DEFAULT = Stream()
DEFAULT.number = 0


@contextlib.contextmanager
def on(stream):
    """Set the current stream of this thread; with None, keep the current one."""
    before = getattr(_threads, "stream", DEFAULT)
    _threads.stream = stream or before
    try:
        yield
    finally:
        _threads.stream = before


def install(library):
    """Make the CPU build of torch see eight GPUs. Nothing can be computed on them with real memory."""
    ctypes.CDLL(str(library))
    import torch

    # what asks whether there is a card while it is imported must have been told the truth
    import torch._dynamo
    import torch._inductor.utils
    import transformers  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def current_stream(device=None):
        return getattr(_threads, "stream", DEFAULT)

    def set_device(device):
        _threads.device = torch.device(device).index if not isinstance(device, int) else device
        called("set_device")

    answers = {
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
        "current_stream": current_stream,
        "stream": on,
        "synchronize": lambda device=None: called("synchronize"),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_lock, cudaHostUnregister=_release),
        "memory_stats": lambda device=None: defaultdict(int),
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: _generator(device),
        "set_rng_state": lambda state, device=None: called(
            "set_rng_state", device and torch.device(device).index
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # a function of its own: torch.compile keeps a table of both
    torch.accelerator.current_stream = lambda device=None: current_stream(device)
    _note_host_memory(torch.Tensor)
    FakeTensorMode.avoid_device_init = property(lambda mode: True)
    FakeTensor.data_ptr = _address


def _note_host_memory(tensor_type):
    """It stays as it is; that it is asked to be page-locked is what counts."""
    from torch.utils.weak import WeakIdKeyDictionary

    global PINNED
    PINNED = WeakIdKeyDictionary()
    tensor_type.pin_memory = lambda tensor, *args: _pinned(tensor)
    tensor_type.is_pinned = lambda tensor, *args: tensor.untyped_storage() in PINNED


def _address(tensor):
    """Another for each tensor that is alive, and for each place in it."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize)


def _lock(pointer, size_bytes, flags):
    LOCKED[pointer] = size_bytes
    return 0


def _release(pointer):
    del LOCKED[pointer]
    return 0


def is_locked(pointer, size_bytes):
    return any(
        start <= pointer and pointer + size_bytes <= start + size for start, size in LOCKED.items()
    )


def _generator(device):
    """The state of the generator of a device, on the host."""
    import torch

    called("get_rng_state", None if device is None else torch.device(device).index)
    return torch.empty(16, dtype=torch.uint8)


def _pinned(tensor):
    called("pin_memory")
    PINNED[tensor.untyped_storage()] = True
    return tensor
