"""What a detector says about a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
VALID_TOKENS = "train/total_valid_token_count"


class Level(StrEnum):
    """What kind of trouble it is."""

    ADVISORY = "advisory"
    """So many single steps stand out that they are one property of the data, not news each."""
    WARN = "warn"
    """One step stands out."""
    RULE = "rule"
    """A rule of the user holds."""
    SEVERE = "severe"
    """A step whose update would do harm."""
    DIVERGING = "diverging"
    """The loss has been rising for a while."""
    DEAD = "dead"
    """Nothing is learned."""
    NONFINITE = "nonfinite"
    """Loss or gradient is not a number."""


LEVEL_NUMBERS: Mapping[Level, int] = {
    Level.ADVISORY: 1,
    Level.WARN: 1,
    Level.RULE: 1,
    Level.SEVERE: 2,
    Level.DIVERGING: 3,
    Level.DEAD: 4,
    Level.NONFINITE: 5,
}
"""For `guard/level`; 0 is an ordinary step."""


@dataclass(frozen=True)
class StepAnomaly:
    """One abnormal thing at one step; what to do about it is decided elsewhere. Unknown numbers
    are None.
    """

    step: int
    level: Level
    signal: str
    """The metric."""
    message: str
    """One sentence for a human."""
    value: float | None = None
    centre: float | None = None
    """The usual level, in the metric's unit."""
    z: float | None = None
    ratio: float | None = None
    """Value over the usual level."""
    onset: int | None = None
    """The step at which the trouble began."""
    action: str | None = None
    """What a rule of the user asks for."""

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON, without what is unknown."""
        return {key: value for key, value in asdict(self).items() if value is not None}
