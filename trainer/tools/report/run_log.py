"""The result of every log reader: series under our metric keys, and facts about the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.tracking.row_losses import HardRow


class UnreadableLogError(ValueError):
    """No reader can read the path. The message names the path, the files that were tried, and the
    fix.
    """


@dataclass(frozen=True)
class Series:
    """One metric: optimizer steps (int64, strictly increasing) and the values (float64) at these steps.

    NaN and infinities are kept. If a step was trained twice, the later value counts.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, kept: slice | NDArray[np.bool_] | NDArray[np.intp]) -> "Series":
        """Return the points that an index, a slice or a mask selects."""
        return Series(self.steps[kept], self.values[kept])

    @property
    def ends(self) -> tuple[int, int]:
        """Return the first and the last step."""
        return int(self.steps[0]), int(self.steps[-1])

    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True)
class LogEvent:
    """An event at a step: a start, an end, a saved checkpoint, a warning or an error."""

    step: int
    kind: str
    message: str
    level: str = "info"
    """info, warn or error."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


@dataclass(frozen=True)
class CheckpointState:
    """A directory `global_step_N` or `checkpoint-N` in the run directory."""

    step: int
    path: Path
    size_bytes: int
    faults: tuple[str, ...] = ()
    """Missing or damaged files, found by name and size. Only this trainer's checkpoints are
    examined.
    """


@dataclass(frozen=True)
class ServingCheck:
    """A certificate from `prove`: a checkpoint's loss when served and when validated."""

    step: int
    engine: str
    val_loss: float
    served_loss: float
    """None or NaN if the engine could not load the checkpoint."""
    tolerance: float
    is_equal: bool
    causes: tuple[str, ...] = ()
    """The reasons why the losses differ."""


@dataclass(frozen=True)
class RunLog:
    """A training log. The keys of `series` are ours: `train/loss`, `train/lr`, `val/loss`, …"""

    path: Path
    source: str
    """fsdp-sft, ms-swift, transformers, verl, roll, csv, tensorboard or jsonl."""
    series: Mapping[str, Series]
    num_rows: int
    num_unparsed: int = 0
    """Number of lines that could not be read, including a torn last line."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options under their dotted names in the framework that wrote the log."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Machine and package versions of the last attempt."""
    sample: str = ""
    """The first sample of the last attempt, with its supervised parts in [[…]]."""
    events: tuple[LogEvent, ...] = ()
    checkpoints: tuple[CheckpointState, ...] = ()
    proofs: tuple[ServingCheck, ...] = ()
    """Sorted by step."""
    hard_rows: tuple[HardRow, ...] = ()
    """The samples whose loss exceeds their batch's loss the most, hardest first."""
    hardest_by_step: Mapping[int, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """For each step, the places and mean losses of its hardest samples."""
    total_steps: int | None = None
    """Number of planned steps; None if unknown."""
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Name (such as eval/code) -> step -> summary from `evaluations.jsonl`."""
    num_attempts: int = 1
    num_lost_steps: int = 0
    """Number of steps that were trained again after a restart or a rollback."""
    span_s: float | None = None
    """Wall time in seconds from the first to the last row; None if the rows have no time."""
    exit_code: int | None = None
    """Exit code of the last attempt; None while the attempt runs or if it was killed."""
    is_running: bool = False
    """True if a process is training in the directory now."""
    notes: tuple[str, ...] = ()
    """Notes from the reader, such as a warning that the format hides NaN losses."""
