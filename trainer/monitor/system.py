"""What the GPU itself reports: utilisation, temperature, power. Sampled beside training."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping

import torch

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
