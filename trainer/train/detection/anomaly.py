"""The result of a detector: one abnormal thing at one step."""

from dataclasses import dataclass
from enum import StrEnum

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
VALID_TOKENS = "train/total_valid_token_count"


class Level(StrEnum):
    """The kind of trouble."""

    ADVISORY = "advisory"
    """Single steps stand out so often that this is a property of the data."""
    WARN = "warn"
    """One step stands out."""
    RULE = "rule"
    """A rule of the user holds."""
    SEVERE = "severe"
    """The update of this step would do harm."""
    DIVERGING = "diverging"
    """The loss has been rising for a while."""
    DEAD = "dead"
    """Nothing is learned."""
    NONFINITE = "nonfinite"
    """Loss or gradient is NaN or infinite."""


@dataclass(frozen=True)
class Anomaly:
    """One abnormal thing at one step. The guard decides what to do about it."""

    step: int
    level: Level
    signal: str
    """The metric."""
    message: str
    """One sentence for a human."""
    onset: int
    """The step at which the trouble began."""
    action: str = ""
    """The answer that a rule of the user asks for."""
