"""What the GPU itself reports: utilisation, temperature, power. Sampled beside training, absent without NVML."""

import contextlib
import importlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

PERIOD_S = 10.0
FIELDS = {
    "gpu_util": "system/gpu_util",
    "gpu_mem_util": "system/gpu_mem_util",
    "gpu_temp_c": "system/gpu_temp_c",
    "gpu_power_w": "system/gpu_power_w",
}


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
        """The newest sample in per cent, degrees Celsius and watts; empty before the first."""
        return self._last

    def summary(self, by_rank: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
        """Over all ranks: the mean of the utilisations, the largest of temperature and power."""
        if not any(by_rank["gpu_temp_c"]):
            return {}
        found = {FIELDS[name]: sum(by_rank[name]) / len(by_rank[name]) for name in ("gpu_util", "gpu_mem_util")}
        found |= {FIELDS[name]: max(by_rank[name]) for name in ("gpu_temp_c", "gpu_power_w")}
        return found | {"system/gpu_util_min": min(by_rank["gpu_util"])}

    def _work(self, period_s: float) -> None:
        stopped = threading.Event()
        with contextlib.suppress(Exception):
            while not stopped.wait(period_s):
                use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                self._last = {
                    "gpu_util": float(use.gpu),
                    "gpu_mem_util": float(use.memory),
                    "gpu_temp_c": float(self._nvml.nvmlDeviceGetTemperature(self._handle, 0)),
                    "gpu_power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                }
