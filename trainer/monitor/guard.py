"""Steps whose loss or gradient is not a number: count them and know when to give up.

The update of such a step is left out on the device, by the same rule (`optim.clip.clipped_step`).
"""

import math
from typing import Any


class NonFiniteGuard:
    """Decides from values that are equal on all ranks, so every rank decides alike. Survives restarts."""

    def __init__(self, *, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self.num_skipped = 0
        self.num_in_a_row = 0

    def count(self, *, loss: float, grad_norm: float) -> None:
        """Take note of a finished step; one without a finite loss and gradient norm was skipped."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.num_in_a_row = 0
            return
        self.num_skipped += 1
        self.num_in_a_row += 1

    @property
    def is_exhausted(self) -> bool:
        return self.num_in_a_row >= self._max_in_a_row

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_skipped = int(state_dict["num_skipped"])
        self.num_in_a_row = int(state_dict["num_in_a_row"])
