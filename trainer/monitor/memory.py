"""Memory of this process and its device, in GiB (2**30 bytes). Sources: psutil, torch.cuda.memory_stats."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

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
