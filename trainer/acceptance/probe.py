"""One rank that looks at its device and at the links between ranks: `python -m trainer.acceptance.probe DEVICE OUTPUT`.

It finds rank and world size in its environment, as a rank of a run does, and writes `OUTPUT/rank_R.json` (floor 5).
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.acceptance import kernels
from trainer.runtime import distributed
from trainer.runtime.files import atomic_write
from trainer.runtime.heartbeat import Heartbeat

TIMEOUT_S = 120
REPEATS = 5


@dataclass(frozen=True)
class Probe:
    """What one rank found. TFLOP/s of one large product in `matmul_dtype`; GB/s that a rank receives in an all-gather
    and sends in a reduce-scatter, 0 for one rank alone.
    """

    device: str
    memory_gib: float
    capability: str
    cuda: str
    nccl: str
    peers: list[int]
    """Cards of this machine that this one reaches directly."""
    kernel_errors: dict[str, float]
    """As shares of what is allowed."""
    kernel_failures: dict[str, str]
    matmul_dtype: str
    matmul_tflops: float
    all_gather_gb_s: float
    reduce_scatter_gb_s: float


def read(output: Path, num_ranks: int) -> list[Probe]:
    return [
        Probe(**json.loads((output / f"rank_{rank}.json").read_text(encoding="utf-8"))) for rank in range(num_ranks)
    ]


def main(argv: list[str]) -> None:
    device_name, output = argv
    device = distributed.pick_device(device_name)
    world = distributed.start(device, timeout_s=TIMEOUT_S, fsdp_size=-1, heartbeat=Heartbeat())
    found = look(device, world.size)
    atomic_write(Path(output) / f"rank_{world.rank}.json", json.dumps(asdict(found)))
    distributed.stop()


def look(device: torch.device, num_ranks: int) -> Probe:
    """Collective."""
    is_cuda = device.type == "cuda"
    dtype = distributed.compute_dtype("auto", device)
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    cards = range(torch.cuda.device_count()) if is_cuda else ()
    gather, scatter = _collectives_gb_s(device, num_ranks)
    errors, failures = kernels.measure(device, {torch.float32: 0, dtype: 0})
    return Probe(
        device=distributed.device_name(device),
        memory_gib=0.0 if properties is None else properties.total_memory / 2**30,
        capability="" if properties is None else f"{properties.major}.{properties.minor}",
        cuda=str(torch.version.cuda or ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "",
        peers=[n for n in cards if n != device.index and torch.cuda.can_device_access_peer(device, n)],
        kernel_errors=errors,
        kernel_failures=failures,
        matmul_dtype=str(dtype).removeprefix("torch."),
        matmul_tflops=matmul_tflops(device, dtype),
        all_gather_gb_s=gather,
        reduce_scatter_gb_s=scatter,
    )


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of one large square product: what products of a model can reach here at best."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / best_s(lambda: a @ a, device) / 1e12


def _collectives_gb_s(device: torch.device, num_ranks: int) -> tuple[float, float]:
    """As FSDP calls them, on buffers as large as a layer's. Collective."""
    if num_ranks == 1:
        return 0.0, 0.0
    size = 2**26 if device.type == "cuda" else 2**20
    part, whole = (torch.ones(n * size, device=device) for n in (1, num_ranks))
    received = part.nbytes * (num_ranks - 1) / 1e9
    works: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce_scatter_tensor(part, whole),
    )
    gather_s, scatter_s = (best_s(work, device) for work in works)
    return received / gather_s, received / scatter_s


def best_s(work: Callable[[], Tensor | object], device: torch.device) -> float:
    """Seconds of the fastest of some repetitions."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
