"""The environment of a rank: torchrun's variables, allocators, threads and the name of commands."""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc


def rank_and_size() -> tuple[int, int]:
    """(rank, number of ranks); without torchrun a run of one rank."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Index of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_on_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection, which takes a fifth of the time: imports make some 350,000
    objects that all stay. Later collections skip these objects too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def let_waiting_threads_sleep() -> None:
    """Shorten how long a CPU thread spins while it waits for another, unless the user chose; before
    torch is imported.

    libgomp spins for milliseconds at the end of every operation. Beside one busy process on the
    same cores that made steps more than five times slower; on idle cores the shorter wait costs
    nothing (benchmarks/README.md).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def grow_cuda_segments() -> None:
    """Let the CUDA allocator grow its blocks unless the user set it otherwise; to be called before
    torch is imported.

    Every batch has another number of tokens, and blocks of fixed size would leave gaps that fit
    none of them.
    """
    if not set(_ALLOCATOR) & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pinned_bytes(size_bytes: int) -> int:
    """Return what a page-locked tensor of `size_bytes` takes: torch allocates the next power of
    two.

    A limit that the user set is honoured. None is set here: up to torch 2.13,
    `pinned_max_round_threshold_mb` hands out blocks that are smaller than asked for
    (github.com/pytorch/pytorch/pull/192722), and `pinned_max_cached_size_mb` page-locks each
    gradient again in every step.
    """
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    limits_mb = re.findall(r"\bpinned_max_(?:round_threshold|cached_size)_mb\s*:\s*(\d+)", settings)
    if any(size_bytes > int(limit_mb) * 2**20 for limit_mb in limits_mb):
        return size_bytes
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the kernel; other C libraries are left
    as they are.

    On a CPU every large tensor would be mapped and unmapped anew, page by page.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**26)


_SCRIPT = Path(__file__).resolve().parents[2] / "run_sft.sh"


def call(words: str) -> str:
    """`bash run_sft.sh WORDS` in a checkout, `fsdp-sft WORDS` of an installed package."""
    return f"{'bash run_sft.sh' if _SCRIPT.is_file() else 'fsdp-sft'} {words}"
