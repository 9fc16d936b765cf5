"""Where the time of a step goes: phases that add up to its wall time, and on request the file
that shows them.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ON_DEVICE = ("shard", "forward", "backward", "optimizer")
"""Phases that the device works through on its own; the others are the host's."""
Span = tuple[str, float, float]
"""Phase, its start (Unix seconds) and its duration in seconds."""


@dataclass(frozen=True)
class _Mark:
    phase: str
    at_s: float
    event: torch.cuda.Event | None


class PhaseClock:
    """`mark(phase)` gives the time since the mark before to `phase`; `lap` ends the step and adds
    up.

    On CUDA the host runs ahead of the device, so phases of the device are measured by events. They
    are read in `lap`, which the caller reaches after it has waited for the device anyway. At the
    first mark of a step the device is idle.
    """

    def __init__(
        self, device: torch.device, *, observe: Callable[[Span], None] | None = None
    ) -> None:
        self._is_cuda = device.type == "cuda"
        self._observe = observe
        self._marks: list[_Mark] = []
        self.begin()

    def begin(self) -> None:
        """Start anew: what passed since the last mark belongs to no step."""
        self._marks = [self._mark("")]

    def mark(self, phase: str) -> float:
        """The time since the last mark belongs to `phase`; returns it in seconds, as the host
        saw it.
        """
        self._marks.append(self._mark(phase))
        return self._marks[-1].at_s - self._marks[-2].at_s

    def exclude(self) -> float:
        """The time since the last mark (a validation, a save) belongs to no step; returns it in
        seconds.
        """
        return self.mark("")

    def lap(self) -> dict[str, float]:
        """Seconds by phase of the step that ends here, with `other`, what no mark claims, and
        `step`, their sum.

        The next step begins here.
        """
        self.mark("other")
        seconds: dict[str, float] = {}
        excluded_s = 0.0
        for before, mark in zip(self._marks, self._marks[1:], strict=False):
            took_s = self._between(before, mark)
            if not mark.phase:
                excluded_s += took_s
                continue
            seconds[mark.phase] = seconds.get(mark.phase, 0.0) + took_s
            if self._observe is not None:
                self._observe((mark.phase, before.at_s, took_s))
        step_s = self._marks[-1].at_s - self._marks[0].at_s - excluded_s
        claimed_s = sum(value for phase, value in seconds.items() if phase != "other")
        self._marks = self._marks[-1:]
        return seconds | {"other": max(0.0, step_s - claimed_s), "step": step_s}

    def _mark(self, phase: str) -> _Mark:
        event = None
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Mark(phase, time.perf_counter(), event)

    def _between(self, before: _Mark, mark: _Mark) -> float:
        if mark.phase in ON_DEVICE and before.event is not None and mark.event is not None:
            return before.event.elapsed_time(mark.event) / 1e3
        return mark.at_s - before.at_s


logger = logging.getLogger(__name__)
DIRECTORY = "trace"
FLUSH_EVERY = 200


class TraceFile:
    """Appends one span a line; the array is never closed, which the format allows. A file that
    fails is given up.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._rank, self._num_spans = rank, 0
        self._offset_s = time.time() - time.perf_counter()
        directory = run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{rank}.json"
        is_new = not path.exists()
        self._file = path.open("a", encoding="utf-8")
        if is_new:
            self._file.write("[\n")

    def span(self, span: Span) -> None:
        """`span` starts on the clock of `time.perf_counter`."""
        phase, start_s, took_s = span
        event = {
            "name": phase,
            "ph": "X",
            "pid": self._rank,
            "tid": os.getpid(),
            "ts": round((start_s + self._offset_s) * 1e6),
            "dur": round(took_s * 1e6),
        }
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(event) + ",\n")
            self._num_spans += 1
            if self._num_spans % FLUSH_EVERY == 0:
                self._file.flush()
        except OSError as error:
            logger.warning("the trace of rank %d ends here: %s", self._rank, error)
            self._file.close()
