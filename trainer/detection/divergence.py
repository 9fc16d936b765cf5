"""Whether a loss has been rising for a while, compared with the best level it ever held."""

from math import inf, isfinite
from typing import Any

from trainer.detection.window import RunningMedian

NUM_RECENT, NUM_BEST = 32, 64
"""The median of so many last steps is judged against the lowest median of so many steps in a row."""
MIN_RATIO, MIN_RISE = 1.25, 0.1
"""The rise that counts: as a ratio, and in nats."""
NUM_IN_A_ROW = 32
"""The excess must last so many steps; as many without it end the episode."""


class Divergence:
    """Takes one finite loss per step. An episode is reported once, when it has lasted long enough."""

    def __init__(self) -> None:
        self._recent = RunningMedian(NUM_RECENT)
        self._long = RunningMedian(NUM_BEST)
        self.best = inf
        self.is_diverging = False
        self._num_in_a_row = 0
        """Steps above the bound outside an episode, steps below it inside one."""
        self._first_step = 0

    def observe(self, step: int, loss: float) -> bool:
        """Whether an episode begins to be sure at this step; `onset`, `recent_median` and `best` then describe it."""
        self._recent.push(loss)
        self._long.push(loss)
        if not self._long.is_full:
            return False
        self.best = min(self.best, self._long.median)
        if (self.recent_median > self._bound) == self.is_diverging:
            self._num_in_a_row = 0
            return False
        if self._num_in_a_row == 0:
            self._first_step = step
        self._num_in_a_row += 1
        if self._num_in_a_row < NUM_IN_A_ROW:
            return False
        self._num_in_a_row = 0
        self.is_diverging = not self.is_diverging
        return self.is_diverging

    @property
    def recent_median(self) -> float:
        return self._recent.median

    @property
    def onset(self) -> int:
        """Where the present episode began: a median crosses its bound when half of its steps are above."""
        return max(0, self._first_step - NUM_RECENT // 2)

    @property
    def _bound(self) -> float:
        # written as a distance, so that it also works for a best level at or below zero
        return self.best + max((MIN_RATIO - 1) * abs(self.best), MIN_RISE)

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": self._long.state(),
            "best": self.best if isfinite(self.best) else 0.0,
            "is_diverging": int(self.is_diverging),
            "num_in_a_row": self._num_in_a_row,
            "first_step": self._first_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = state_dict["values"]
        self._long.load(values)
        self._recent.load(values[-NUM_RECENT:])
        self.best = float(state_dict["best"]) if self._long.is_full else inf
        self.is_diverging = bool(state_dict["is_diverging"])
        self._num_in_a_row = int(state_dict["num_in_a_row"])
        self._first_step = int(state_dict["first_step"])
