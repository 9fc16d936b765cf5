"""The environment of a rank: torchrun's variables, allocators, threads, and the command's name."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc
_SCRIPT = Path(__file__).resolve().parents[2] / "run_sft.sh"


def rank_and_size() -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Return the index of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_on_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during imports, because it takes a fifth of their time. Imports
    create about 350,000 objects, and none of them is freed. Later collections skip these objects
    too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def let_waiting_threads_sleep() -> None:
    """Shorten the time that a waiting CPU thread spins, unless the user has set it. Call it before
    torch is imported.

    libgomp spins for milliseconds at the end of every operation. Next to one busy process on the
    same cores, steps took more than five times as long. On idle cores a shorter wait costs nothing
    (benchmarks/README.md).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def grow_cuda_segments() -> None:
    """Let the CUDA allocator grow its blocks, unless the user configured it. Call it before torch
    is imported.

    Every batch has a different number of tokens, and blocks of fixed size would leave unusable
    gaps.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pinned_bytes(size_bytes: int) -> int:
    """Return the bytes that a page-locked tensor of `size_bytes` takes: torch rounds up to a power
    of two.

    No limit is set here. Up to torch 2.13, `pinned_max_round_threshold_mb` returns blocks that are
    too small (github.com/pytorch/pytorch/pull/192722), and `pinned_max_cached_size_mb` page-locks
    each gradient again in every step.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the kernel.

    On a CPU, every large tensor would otherwise be mapped and unmapped, page by page.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**26)


def call(words: str) -> str:
    """Return the command line: `bash run_sft.sh WORDS` in a checkout, else `fsdp-sft WORDS`."""
    return f"{'bash run_sft.sh' if _SCRIPT.is_file() else 'fsdp-sft'} {words}"
