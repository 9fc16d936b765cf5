"""What parts of one floor ask of each other (floor 0)."""

from typing import Protocol


class StepCost(Protocol):
    """Floating-point operations of a global batch."""

    def of(self, *, num_tokens: int, num_loss_tokens: int, sum_squared_lengths: int) -> float: ...
