"""Measure how a step's wall time divides into phases, and optionally write the phases to a file."""

import json
import logging
import os
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)
ON_DEVICE = ("shard", "forward", "backward", "optimizer")
"""Phases whose time is measured on the device. The other phases are measured on the host."""
DIRECTORY = "trace"


class TraceFile:
    """`trace/rank_N.json` for Perfetto: a JSON array with one span per line.

    The array is never closed, which the format allows. After an error nothing more is written.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._rank = rank
        self._offset_s = time.time() - time.perf_counter()
        path = run_dir / DIRECTORY / f"rank_{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size == 0:
            self._file.write("[\n")

    def span(
        self,
        phase: str,
        start_s: float,
        took_s: float,
    ) -> None:
        """Add a span that starts at `start_s` on the clock of `time.perf_counter`."""
        if self._file.closed:
            return
        event = {
            "name": phase,
            "ph": "X",
            "pid": self._rank,
            "tid": os.getpid(),
            "ts": round((start_s + self._offset_s) * 1e6),
            "dur": round(took_s * 1e6),
        }
        try:
            self._file.write(json.dumps(event) + ",\n")
        except OSError as error:
            logger.warning("the trace of rank %d ends early: %s", self._rank, error)
            self._file.close()


class _Mark(NamedTuple):
    phase: str
    at_s: float
    event: torch.cuda.Event | None


class PhaseClock:
    """Assigns the time between two marks to the phase of the second mark.

    On CUDA the host runs ahead of the device, so CUDA events measure the phases of the device.
    `lap` reads the events; the caller has already waited for the device by then. At the first mark
    of a step the device is idle.
    """

    def __init__(self, device: torch.device, *, trace: TraceFile | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._trace = trace
        self._marks: list[_Mark] = []
        self.begin()

    def begin(self) -> None:
        """Start a step. The time since the last mark counts towards no step."""
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        event = None
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(_Mark(phase, time.perf_counter(), event))

    def exclude(self) -> None:
        """Exclude the time since the last mark, such as a validation or a save, from the step."""
        self.mark("")

    def lap(self) -> defaultdict[str, float]:
        """End the step, begin the next one, and return seconds by phase (0 without a mark).

        `other` is the time outside the named phases, and `step` is the step's wall time.
        """
        self.mark("other")
        seconds: defaultdict[str, float] = defaultdict(float)
        step_s = 0.0
        for before, mark in pairwise(self._marks):
            if not mark.phase:
                continue
            took_s = mark.at_s - before.at_s
            step_s += took_s
            if mark.phase in ON_DEVICE and before.event is not None and mark.event is not None:
                took_s = before.event.elapsed_time(mark.event) / 1e3
            seconds[mark.phase] += took_s
            if self._trace is not None:
                self._trace.span(mark.phase, before.at_s, took_s)
        self._marks = self._marks[-1:]
        # The host waited for the device during its own `other`, but the phases of the device
        # include that work. Therefore `other` is the rest of the wall time.
        claimed_s = sum(seconds.values()) - seconds["other"]
        seconds |= {"other": max(0.0, step_s - claimed_s), "step": step_s}
        return seconds
