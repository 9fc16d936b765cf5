"""Time and memory around single phases under ROLL's names, for who compares with it; off unless asked for.

`time/<infix>/{total,execute,onload,offload}` in seconds; memory in GiB: of the process before and after a phase, and of
the device (rank 0's) before and after states are moved to it. Nothing is moved here: onload and offload take no
time, and the two memory figures are the same.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer import metrics
from trainer.monitor.memory import DEVICE_FIELDS, Memory
from trainer.runtime.environment import local_rank

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
