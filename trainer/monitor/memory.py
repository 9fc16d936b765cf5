"""Memory of this process and its device, in GiB (2**30 bytes), and what the GPU itself reports."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping

import psutil
import torch

GIB = 2**30
DEVICE_FIELDS = ("allocated", "reserved", "max_allocated", "max_reserved")
"""Of a sample, each with `_gib` behind its name."""


class Memory:
    """The only one that resets the allocator's peaks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()

    def sample(self) -> dict[str, float]:
        """Resident and virtual memory of the process; on CUDA the allocator's, with its peaks
        since the last call.
        """
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
        return found

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
    """Asks about this rank's device every `PERIOD_S` seconds in a daemon thread; `last` never
    waits.

    By NVML, for which torch needs the package `nvidia-ml-py` (the extra `gpu`), else by the
    driver's `nvidia-smi`. Without either, or without CUDA, there is nothing to report.
    """

    def __init__(self, device: torch.device) -> None:
        self._last: dict[str, float] = {}
        if device.type == "cuda":
            threading.Thread(
                target=self._work, args=(device,), name="gpu-sampler", daemon=True
            ).start()

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
        values = (
            cuda.utilization(device),
            cuda.memory_usage(device),
            cuda.temperature(device),
            cuda.power_draw(device),
        )
        util, mem_util, temp_c, power_mw = map(float, values)
        found: tuple[float, ...] = (util, mem_util, temp_c, power_mw / 1e3)
    except ModuleNotFoundError:
        card = f"GPU-{cuda.get_device_properties(device).uuid}"
        words = [
            "nvidia-smi",
            "-i",
            card,
            f"--query-gpu={','.join(QUERIES.values())}",
            "--format=csv,noheader,nounits",
        ]
        answer = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=PERIOD_S
        ).stdout
        found = tuple(map(float, answer.split(",")))
    return dict(zip(QUERIES, found, strict=True))
