"""Measure the memory of this process and its device in GiB (2**30 bytes).

Also read the utilization, temperature and power that the GPU reports.
"""

import subprocess
import time

import psutil
import torch

from trainer.runtime.processes import begun

GIB = 2**30
PERIOD_S = 10.0
ALLOCATOR = {
    "memory/allocated_gib": "allocated_bytes.all.current",
    "memory/max_allocated_gib": "allocated_bytes.all.peak",
    "memory/max_reserved_gib": "reserved_bytes.all.peak",
}
"""Maps each metric to the statistic of torch's allocator."""
QUERIES = {
    "system/gpu_util": "utilization.gpu",
    "system/gpu_temp_c": "temperature.gpu",
    "system/gpu_power_w": "power.draw",
}
"""Maps each metric to the query of `nvidia-smi`."""


class Memory:
    """Measures the memory of this rank. No other object may reset the allocator's peaks.

    On CUDA a daemon thread asks the driver's `nvidia-smi`, if there is one, about this rank's
    device every `PERIOD_S` seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._device_gib = 0.0
        self._gpu: dict[str, float] = {}
        """The newest sample from the driver."""
        if device.type == "cuda":
            self._device_gib = torch.cuda.get_device_properties(device).total_memory / GIB
            begun(self._ask_driver, name="gpu-sampler")

    def sample(self) -> dict[str, float]:
        """Return memory metrics.

        They cover the process. On CUDA they also cover the allocator, with its peaks since the last
        call, and the GPU's own sample.
        """
        found = {"memory/cpu/rss_gib": self._process.memory_info().rss / GIB}
        if not self._device_gib:
            return found
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        found |= {key: stats[name] / GIB for key, name in ALLOCATOR.items()}
        found["memory/max_reserved_frac"] = found["memory/max_reserved_gib"] / self._device_gib
        found["memory/alloc_retries"] = stats["num_alloc_retries"]
        found["memory/ooms"] = stats["num_ooms"]
        return found | self._gpu

    def _ask_driver(self) -> None:
        """Sample repeatedly until a query fails, for example without a driver or permission."""
        torch.cuda.set_device(self._device)
        while True:
            time.sleep(PERIOD_S)
            self._gpu = sample(self._device)


def sample(device: torch.device) -> dict[str, float]:
    """Return the metrics that the GPU itself reports."""
    command = [
        "nvidia-smi",
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        f"--query-gpu={','.join(QUERIES.values())}",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.check_output(command, text=True, timeout=PERIOD_S)
    values = zip(QUERIES, answer.split(","), strict=True)
    # a slice of a card or a virtual one answers "[N/A]" to some queries
    return {key: float(text) for key, text in values if "[" not in text}
