"""How much is said about single steps: warnings are rationed, and a heavy tail is told once."""

from collections import deque
from typing import Any

RATE_STEPS = 1000
"""Rates are per so many steps."""


MIN_STEPS_BETWEEN = 50
"""Between two warnings."""
MAX_SINGLES = 10
"""More steps than this per 1000 that stood out alone are a property of the data; half of it ends that."""


class WarnLedger:
    """Counts steps that stood out. Steps are numbered by itself: a step that is trained again counts again."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._spikes: deque[int] = deque()
        self._singles: deque[int] = deque()
        self._num_spikes_in_a_row = 0
        self._last_warning = -MIN_STEPS_BETWEEN
        self._is_heavy = False

    @property
    def spike_rate(self) -> float:
        """Steps that stood out per 1000, over the last 1000."""
        return len(self._spikes) * RATE_STEPS / max(1, min(self._num_steps, RATE_STEPS))

    @property
    def num_singles(self) -> int:
        """Among the last 1000 steps, those that stood out while both neighbours did not."""
        return len(self._singles)

    def count(self, *, is_spike: bool) -> bool:
        """Take note of a step; whether it just became clear that batches are heavy-tailed."""
        self._num_steps += 1
        if not is_spike and self._num_spikes_in_a_row == 1:
            self._singles.append(self._num_steps - 1)
        self._num_spikes_in_a_row = self._num_spikes_in_a_row + 1 if is_spike else 0
        if is_spike:
            self._spikes.append(self._num_steps)
        for steps in (self._spikes, self._singles):
            while steps and steps[0] <= self._num_steps - RATE_STEPS:
                steps.popleft()
        if self._is_heavy:
            self._is_heavy = len(self._singles) > MAX_SINGLES // 2
            return False
        self._is_heavy = len(self._singles) > MAX_SINGLES
        return self._is_heavy

    def may_warn(self) -> bool:
        """Whether a warning about the step counted last may be given; if so, it counts as given."""
        if self._is_heavy or self._num_steps - self._last_warning < MIN_STEPS_BETWEEN:
            return False
        self._last_warning = self._num_steps
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "spikes": list(self._spikes),
            "singles": list(self._singles),
            "num_spikes_in_a_row": self._num_spikes_in_a_row,
            "last_warning": self._last_warning,
            "is_heavy": int(self._is_heavy),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_steps = int(state_dict["num_steps"])
        self._spikes = deque(map(int, state_dict["spikes"]))
        self._singles = deque(map(int, state_dict["singles"]))
        self._num_spikes_in_a_row = int(state_dict["num_spikes_in_a_row"])
        self._last_warning = int(state_dict["last_warning"])
        self._is_heavy = bool(state_dict["is_heavy"])
