"""The result of every reader of training logs: series under our keys, and facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.tracking.row_losses import HardRow


class UnreadableLogError(ValueError):
    """No reader can read the path; the message names it, the files that were tried, and the fix."""


@dataclass(frozen=True)
class Series:
    """One metric: `steps` (int64, strictly rising) and `values` (float64) at these optimizer steps.

    NaN and infinities are kept. If a step was trained twice, the later value counts.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, kept: slice | NDArray[np.bool_] | NDArray[np.intp]) -> "Series":
        """Return some of its points."""
        return Series(self.steps[kept], self.values[kept])

    @property
    def ends(self) -> tuple[int, int]:
        """Return the first and the last step."""
        return int(self.steps[0]), int(self.steps[-1])

    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True)
class LogEvent:
    """A start, an end, a saved checkpoint, a warning or an error at a step."""

    step: int
    kind: str
    message: str
    level: str = "info"
    """info, warn or error."""


@dataclass(frozen=True)
class CheckpointState:
    """A directory `global_step_N` or `checkpoint-N` in the run directory."""

    step: int
    path: Path
    size_bytes: int
    faults: tuple[str, ...] = ()
    """Missing or damaged parts, by file names and sizes; only of our checkpoints."""

    @property
    def is_complete(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class ServingCheck:
    """A certificate of `prove`: the loss of a served checkpoint and the loss of its validation."""

    step: int
    engine: str
    val_loss: float
    served_loss: float
    """None or NaN if the engine could not load it."""
    tolerance: float
    is_equal: bool
    causes: tuple[str, ...] = ()
    """Why the losses differ."""


@dataclass(frozen=True)
class RunLog:
    """A log. `series` has our keys: `train/loss`, `train/lr`, `train/grad_norm`, `val/loss`, …"""

    path: Path
    source: str
    """fsdp-sft, ms-swift, transformers, verl, roll, csv, tensorboard or jsonl."""
    series: Mapping[str, Series]
    num_rows: int
    num_unparsed: int = 0
    """Lines that could not be read, a torn last line included."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted names of the framework that wrote the log."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Machine and versions of the last attempt."""
    sample: str = ""
    """The first sample of the last attempt, with its supervised parts in [[…]]."""
    events: tuple[LogEvent, ...] = ()
    checkpoints: tuple[CheckpointState, ...] = ()
    proofs: tuple[ServingCheck, ...] = ()
    """By rising step."""
    hard_rows: tuple[HardRow, ...] = ()
    """Samples whose loss exceeds that of their batches most, the hardest first."""
    hardest_by_step: Mapping[int, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """Places and mean losses of the hardest samples of each step."""
    total_steps: int | None = None
    """Planned steps, None if unknown."""
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Name (as eval/code) -> step -> its summary in `evaluations.jsonl`."""
    num_attempts: int = 1
    num_lost_steps: int = 0
    """Steps that were trained again after a restart or a rollback."""
    span_s: float | None = None
    """Wall time from the first to the last row, None if rows have no clock."""
    exit_code: int | None = None
    """Exit code of the last attempt, None while it runs or if it was killed."""
    is_running: bool = False
    """Whether a process trains in the directory now."""
    notes: tuple[str, ...] = ()
    """Remarks of the reader, as that the format hides NaN losses."""
