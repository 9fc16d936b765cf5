"""The vocabulary of the loop (floor 0): what a part must offer, without saying which class offers it."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps: finished optimizer steps, and samples consumed of epoch `epoch`.

    It does not depend on the number of ranks. A finished epoch is the start of the next.
    """

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0


@dataclass(frozen=True)
class Decision:
    """What the guard wants done after a step or a validation; equal on all ranks."""

    wants_evidence: bool = False
    rollback_onset: int | None = None
    """The step with which the trouble began: go back to a checkpoint before it."""
    is_stop: bool = False
    reason: str = ""


@dataclass
class LoopState:
    """What the loop itself remembers over a restart."""

    owes_validation: bool = False
    """A stop request cut or put off the validation of the saved step: it is made up for before anything else."""
    has_stopped_early: bool = False
    """The run ended before its last step because the validation loss no longer fell."""

    def state_dict(self) -> dict[str, Any]:
        return {"owes_validation": self.owes_validation, "has_stopped_early": self.has_stopped_early}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owes_validation = bool(state_dict["owes_validation"])
        self.has_stopped_early = bool(state_dict.get("has_stopped_early", False))


class StepCost(Protocol):
    """Floating-point operations of a global batch."""

    def of(self, *, num_tokens: int, num_loss_tokens: int, sum_squared_lengths: int) -> float: ...


class Stateful(Protocol):
    """A part that survives a restart."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
