"""Time and memory around single phases under ROLL's names, for who compares with it; off unless asked for.

`time/<infix>/{total,execute,onload,offload}` in seconds; memory in GiB: of the process before and after a phase, and of
the device (rank 0's) before and after states are moved to it. Nothing is moved here: onload and offload take no
time, and the two memory figures are the same.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.monitor.memory import Memory
from trainer.runtime.environment import local_rank

DEVICE_FIELDS = ("allocated", "reserved", "max_allocated", "max_reserved")
LEVELS = {"off": (), "checkpoint": ("sft/do_checkpoint", "sft/eval"), "step": None}
"""Which phases each setting of `trainer.roll_detail` shows; None: all."""


class RollDetail:
    """Measures phases of this rank; `take_metrics` hands out what was measured since."""

    def __init__(self, memory: Memory, *, level: str) -> None:
        self._memory, self._phases = memory, LEVELS[level]
        self._metrics: dict[str, float] = {}

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
        self._note(infix, took_s, {"start": before, "end": after})

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _note(self, infix: str, took_s: float, samples: dict[str, dict[str, float]]) -> None:
        found = self._metrics
        found |= {f"time/{infix}/total": took_s, f"time/{infix}/execute": took_s}
        found |= {f"time/{infix}/onload": 0.0, f"time/{infix}/offload": 0.0}
        for when, sample in samples.items():
            found |= {f"memory/cpu/{infix}/{when}/{name}": sample[f"{name}_gib"] for name in ("rss", "vms")}
            if "allocated_gib" not in sample:
                continue
            for where in ("offload", "onload"):
                for name in DEVICE_FIELDS:
                    found[f"memory/{infix}/{when}/{where}/{name}/{local_rank()}"] = sample[f"{name}_gib"]
        total = self._memory.device_total_gib
        if total is not None:
            for name in ("max_allocated", "max_reserved"):
                key = f"memory/{infix}/end/onload/{name}_frac/{local_rank()}"
                found[key] = samples["end"][f"{name}_gib"] / total
