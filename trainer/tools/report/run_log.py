"""The result of every reader of training logs: series under our key names, and facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.tracking.row_losses import HardRow


class UnreadableLogError(ValueError):
    """No reader understands the path; the message names it, what was tried, and the fix."""


@dataclass(frozen=True)
class Series:
    """One metric over the optimizer steps it was logged at: `steps` int64, strictly rising;
    `values` float64.

    NaN and infinities stand as they were logged. A step trained twice shows what counted in the
    end.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, kept: slice | NDArray[np.bool_] | NDArray[np.intp]) -> "Series":
        """Some of its points."""
        return Series(self.steps[kept], self.values[kept])

    @property
    def ends(self) -> tuple[int, int]:
        """First and last step."""
        return int(self.steps[0]), int(self.steps[-1])

    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True)
class LogEvent:
    """Something that happened at a step: a start, a stop, a saved checkpoint, an alert of the
    guard, an error.
    """

    step: int
    kind: str
    message: str
    level: str = "info"
    """info, warn or error."""


@dataclass(frozen=True)
class CheckpointState:
    """One `global_step_N` (or `checkpoint-N`) directory that exists beside the log."""

    step: int
    path: Path
    size_bytes: int
    faults: tuple[str, ...] = ()
    """Parts that are missing or damaged, as far as file names and sizes tell."""

    @property
    def is_complete(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class ServingCheck:
    """A certificate of `prove`: the loss that an engine serves a checkpoint with, beside that
    of its validation.
    """

    step: int
    engine: str
    val_loss: float
    served_loss: float
    """NaN where the engine could not load it."""
    tolerance: float
    is_equal: bool
    causes: tuple[str, ...] = ()
    """Why not."""


@dataclass(frozen=True)
class RunLog:
    """A log as read. `series` has canonical keys (`train/loss`, `train/lr`, `train/grad_norm`,
    `val/loss`, ...).
    """

    path: Path
    source: str
    """fsdp-sft, ms-swift, transformers, verl, roll, csv, tensorboard or jsonl."""
    series: Mapping[str, Series]
    num_rows: int
    num_unparsed: int = 0
    """Lines or records that could not be read; a torn last line is one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Flat, dotted names, as the run's own framework calls them."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Machine and versions of the last attempt."""
    sample: str = ""
    """The first sample of the last attempt, its supervised parts in [[…]]."""
    events: tuple[LogEvent, ...] = ()
    checkpoints: tuple[CheckpointState, ...] = ()
    proofs: tuple[ServingCheck, ...] = ()
    """Proofs by rising step."""
    hard_rows: tuple[HardRow, ...] = ()
    """Samples whose loss exceeds that of their batches most, the hardest first."""
    hardest_by_step: Mapping[int, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """Places and mean losses of the hardest samples of each step."""
    tracker_step: int | None = None
    """The step in `latest_checkpointed_iteration.txt`."""
    total_steps: int | None = None
    """Planned, where the log or the configuration tells."""
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Name (as eval/code) -> step -> its summary in `evaluations.jsonl`."""
    num_attempts: int = 1
    num_lost_steps: int = 0
    """Steps that were trained again after a restart or a rollback."""
    span_s: float | None = None
    """Wall time from the first to the last row, where rows carry a clock."""
    exit_code: int | None = None
    """How the last attempt ended, None while it runs or where nobody wrote it down."""
    is_running: bool = False
    """A process trains in its directory right now."""
    notes: tuple[str, ...] = ()
    """Remarks of the reader, e.g. that the format hides NaN losses."""
