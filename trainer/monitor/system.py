"""What the GPU itself reports: utilisation, temperature, power. Sampled beside training, absent without NVML."""

import contextlib
import threading
import time
from collections.abc import Mapping

import torch

PERIOD_S = 10.0


class GpuSampler:
    """Asks NVML about this rank's device every `PERIOD_S` seconds in a daemon thread; `last` never waits.

    Needs the package `nvidia-ml-py` (the extra `gpu`); without it, or without CUDA, there is nothing to report.
    """

    def __init__(self, device: torch.device) -> None:
        self._last: dict[str, float] = {}
        if device.type == "cuda":
            threading.Thread(target=self._work, args=(device,), name="gpu-sampler", daemon=True).start()

    def last(self) -> Mapping[str, float]:
        """The newest sample as metrics; empty before the first."""
        return self._last

    def _work(self, device: torch.device) -> None:
        with contextlib.suppress(Exception):  # the package, the driver or the permission is missing
            torch.cuda.set_device(device)
            while True:
                time.sleep(PERIOD_S)
                self._last = {
                    "system/gpu_util": float(torch.cuda.utilization(device)),
                    "system/gpu_mem_util": float(torch.cuda.memory_usage(device)),
                    "system/gpu_temp_c": float(torch.cuda.temperature(device)),
                    "system/gpu_power_w": torch.cuda.power_draw(device) / 1e3,
                }
