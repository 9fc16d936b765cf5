"""The position, history and rollbacks of a run, and the state that the run's parts keep across a
restart.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

ALL = "all"
MAIN = "main"
OWN = "own"
"""Values of a part's attribute `state_of`. ALL: the state is equal on all ranks. MAIN: the state of
rank 0 counts. OWN: each rank has a separate state, so a resume needs the same number of ranks.
"""


@dataclass(frozen=True)
class Position:
    """A place between two steps: the number of finished optimizer steps, and of consumed samples in
    epoch `epoch`.

    It does not depend on the number of ranks. The end of an epoch is the start of the next one.
    """

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0


@dataclass(frozen=True)
class History:
    """The history that determines which checkpoints are kept."""

    best_step: int | None = None
    """The step with the lowest validation loss so far. Rotation keeps its checkpoint."""
    episodes: tuple[tuple[int, int], ...] = ()
    """First and last step of each stretch of trouble. Rotation keeps the newest checkpoint before
    the last stretch.
    """


@dataclass(frozen=True)
class Rollback:
    """A rollback from the state after step `found_step` to the state after `target_step`. The steps
    from `first_skipped` to `last_skipped` are not trained again.
    """

    onset: int
    found_step: int
    target_step: int
    first_skipped: int
    last_skipped: int
    reason: str
    discarded: list[str]
    """Nonces of the newer checkpoints, which are set aside. A start after a crash sets them aside
    too.
    """

    def overlaps(self, other: "Rollback") -> bool:
        return self.first_skipped <= other.last_skipped and other.first_skipped <= self.last_skipped


@dataclass(frozen=True)
class Rollbacks:
    """All rollbacks of a run, oldest first."""

    entries: tuple[Rollback, ...] = ()

    @property
    def skipped_steps(self) -> frozenset[int]:
        """Steps, counted from 1, that are not trained."""
        return frozenset(
            step
            for entry in self.entries
            for step in range(entry.first_skipped, entry.last_skipped + 1)
        )

    @property
    def discarded_nonces(self) -> frozenset[str]:
        """Nonces of the checkpoints that do not belong to the run any more."""
        return frozenset(nonce for entry in self.entries for nonce in entry.discarded)

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rate, halved each time training fails again at the same steps."""
        num_repeats = sum(
            any(entry.overlaps(before) for before in self.entries[:index])
            for index, entry in enumerate(self.entries)
        )
        return float(0.5**num_repeats)


class Remembered:
    """An object whose attributes in `KEPT`, by default all, survive a restart. They hold numbers,
    lists and mappings, which JSON preserves exactly. If a checkpoint lacks an attribute, the
    attribute keeps its current value.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()

    def _kept(self) -> tuple[str, ...]:
        return self.KEPT or tuple(vars(self))

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): _plain(getattr(self, name)) for name in self._kept()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name in self._kept():
            if (key := name.lstrip("_")) in state_dict:
                setattr(self, name, _loaded(getattr(self, name), state_dict[key]))


def _plain(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _loaded(now: Any, saved: Any) -> Any:
    """Return the saved value, converted to the type of the current one. A mapping keeps its current
    keys.
    """
    if hasattr(now, "load_state_dict"):
        now.load_state_dict(saved)
        return now
    if isinstance(now, Mapping):
        return {key: saved.get(key, value) for key, value in now.items()}
    if isinstance(now, list | deque):
        items = [tuple(item) if isinstance(item, list) else item for item in saved]
        return deque(items, now.maxlen) if isinstance(now, deque) else items
    return type(now)(saved)


@dataclass
class LoopState(Remembered):
    """State of the loop itself that survives a restart."""

    owes_validation: bool = False
    """A stop request prevented the validation of the saved step. The next start runs it first."""
    has_stopped_early: bool = False
    """The run ended before its last step because the validation loss no longer fell."""
