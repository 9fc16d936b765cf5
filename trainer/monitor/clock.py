"""Where the time of a step goes: phases that add up to its wall time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

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
    """`mark(phase)` gives the time since the mark before to `phase`; `lap` ends the step and adds up.

    On CUDA the host runs ahead of the device, so phases of the device are measured by events. They are read in `lap`,
    which the caller reaches after it has waited for the device anyway. At the first mark of a step the device is idle.
    """

    def __init__(self, device: torch.device, *, observe: Callable[[Span], None] | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._observe = observe
        self._marks: list[_Mark] = []
        self.begin()

    def begin(self) -> None:
        """Start anew: what passed since the last mark belongs to no step."""
        self._marks = [self._mark("")]

    def mark(self, phase: str) -> float:
        """The time since the last mark belongs to `phase`; returns it in seconds, as the host saw it."""
        self._marks.append(self._mark(phase))
        return self._marks[-1].at_s - self._marks[-2].at_s

    def exclude(self) -> float:
        """The time since the last mark (a validation, a save) belongs to no step; returns it in seconds."""
        return self.mark("")

    def lap(self) -> dict[str, float]:
        """Seconds by phase of the step that ends here, with `other`, what no mark claims, and `step`, their sum.

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
