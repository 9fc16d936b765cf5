"""What the GPU itself reports: utilisation, temperature, power. Sampled beside training, absent without NVML."""

import contextlib
import importlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

PERIOD_S = 10.0


class GpuSampler:
    """Asks NVML about this rank's device every `PERIOD_S` seconds in a daemon thread; `last` never waits.

    Needs the package `nvidia-ml-py` (the extra `gpu`); without it, or without CUDA, there is nothing to report.
    """

    def __init__(self, device: torch.device, *, period_s: float = PERIOD_S) -> None:
        self._last: dict[str, float] = {}
        self._nvml: Any = None
        if device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # the package, the driver or the permission is missing
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            threading.Thread(target=self._work, args=(period_s,), name="gpu-sampler", daemon=True).start()

    def last(self) -> Mapping[str, float]:
        """The newest sample as metrics; empty before the first."""
        return self._last

    def _work(self, period_s: float) -> None:
        stopped = threading.Event()
        with contextlib.suppress(Exception):
            while not stopped.wait(period_s):
                use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                self._last = {
                    "system/gpu_util": float(use.gpu),
                    "system/gpu_mem_util": float(use.memory),
                    "system/gpu_temp_c": float(self._nvml.nvmlDeviceGetTemperature(self._handle, 0)),
                    "system/gpu_power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                }
