"""Memory of this process and its device, in GiB (2**30 bytes), what the GPU itself reports, and ROLL's view of both."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from trainer import metrics
from trainer.runtime.environment import local_rank

GIB = 2**30
PEAKS = ("max_allocated_gib", "max_reserved_gib")
DEVICE_FIELDS = ("allocated", "reserved", "max_allocated", "max_reserved")
"""Of a sample, each with `_gib` behind its name."""


class Memory:
    """The only one that resets the allocator's peaks: whoever wants a peak of its own opens a span."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self._spans: list[dict[str, float]] = []

    def sample(self) -> dict[str, float]:
        """Resident and virtual memory of the process; on CUDA the allocator's, with its peaks since the last call."""
        info = self._process.memory_info()
        found = {"rss_gib": info.rss / GIB, "vms_gib": info.vms / GIB}
        if self._device.type != "cuda":
            return found
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        found |= {
            "allocated_gib": stats["allocated_bytes.all.current"] / GIB,
            "reserved_gib": stats["reserved_bytes.all.current"] / GIB,
            "max_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
            "max_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "alloc_retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }
        for span in self._spans:
            for name in PEAKS:
                span[name] = max(span.get(name, 0.0), found[name])
        return found

    @contextmanager
    def span(self) -> Iterator[Mapping[str, float]]:
        """The peaks from entry to exit, filled in by the samples taken meanwhile and one at the end."""
        self.sample()
        peaks: dict[str, float] = {}
        self._spans.append(peaks)
        try:
            yield peaks
            self.sample()
        finally:
            self._spans.remove(peaks)

    @property
    def device_total_gib(self) -> float | None:
        """What the device holds in all; None for the host."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self._device).total_memory / GIB


PERIOD_S = 10.0
QUERIES = {
    "system/gpu_util": "utilization.gpu",
    "system/gpu_mem_util": "utilization.memory",
    "system/gpu_temp_c": "temperature.gpu",
    "system/gpu_power_w": "power.draw",
}
"""What `nvidia-smi` is asked for each metric."""


class GpuSampler:
    """Asks about this rank's device every `PERIOD_S` seconds in a daemon thread; `last` never waits.

    By NVML, for which torch needs the package `nvidia-ml-py` (the extra `gpu`), else by the driver's `nvidia-smi`.
    Without either, or without CUDA, there is nothing to report.
    """

    def __init__(self, device: torch.device) -> None:
        self._last: dict[str, float] = {}
        if device.type == "cuda":
            threading.Thread(target=self._work, args=(device,), name="gpu-sampler", daemon=True).start()

    def last(self) -> Mapping[str, float]:
        """The newest sample as metrics; empty before the first."""
        return self._last

    def _work(self, device: torch.device) -> None:
        with contextlib.suppress(Exception):  # the driver or the permission is missing
            torch.cuda.set_device(device)
            while True:
                time.sleep(PERIOD_S)
                self._last = sample(device)


def sample(device: torch.device) -> dict[str, float]:
    cuda = torch.cuda
    try:
        values = cuda.utilization(device), cuda.memory_usage(device), cuda.temperature(device), cuda.power_draw(device)
        util, mem_util, temp_c, power_mw = map(float, values)
        found: tuple[float, ...] = (util, mem_util, temp_c, power_mw / 1e3)
    except ModuleNotFoundError:
        card = f"GPU-{cuda.get_device_properties(device).uuid}"
        words = ["nvidia-smi", "-i", card, f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(words, check=True, capture_output=True, text=True, timeout=PERIOD_S).stdout
        found = tuple(map(float, answer.split(",")))
    return dict(zip(QUERIES, found, strict=True))


LEVELS = {"off": (), "checkpoint": ("sft/do_checkpoint", "sft/eval"), "step": None}
"""Which phases each setting of `trainer.roll_detail` shows; None: all."""


class RollDetail:
    """Measures phases of this rank, for the row that is logged next."""

    def __init__(self, memory: Memory, *, level: str) -> None:
        self._memory, self._phases = memory, LEVELS[level]

    @contextmanager
    def phase(self, infix: str) -> Iterator[None]:
        """`infix` is `sft/train_step`, `sft/do_checkpoint` or `sft/eval`."""
        if self._phases is not None and infix not in self._phases:
            yield
            return
        started = time.perf_counter()
        with self._memory.span() as peaks:
            before = self._memory.sample()
            yield
        took_s, after = time.perf_counter() - started, {**self._memory.sample(), **peaks}
        for name, seconds in (("total", took_s), ("execute", took_s), ("onload", 0.0), ("offload", 0.0)):
            metrics.put(f"time/{infix}/{name}", seconds)
        self._put(infix, "start", before)
        self._put(infix, "end", after)
        if (total := self._memory.device_total_gib) is not None:
            for name in ("max_allocated", "max_reserved"):
                metrics.put(f"memory/{infix}/end/onload/{name}_frac/{local_rank()}", after[f"{name}_gib"] / total)

    def _put(self, infix: str, edge: str, sample: dict[str, float]) -> None:
        for name in ("rss", "vms"):
            metrics.put(f"memory/cpu/{infix}/{edge}/{name}", sample[f"{name}_gib"])
        for place in ("offload", "onload") if "allocated_gib" in sample else ():
            for name in DEVICE_FIELDS:
                metrics.put(f"memory/{infix}/{edge}/{place}/{name}/{local_rank()}", sample[f"{name}_gib"])
