"""What a check looks at, and what it says (floor 5, no torch)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from trainer.config import Config
from trainer.launch.ranks import NodeLayout


@dataclass(frozen=True)
class Checked:
    """fail: the run would not do what it is asked for. `fix`: empty where `what`, an error's own words, has it."""

    level: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Launch:
    """What would be started on this machine; `problem`: why that many ranks cannot be."""

    config: Config
    num_ranks: int
    num_gpus: int = 0
    layout: NodeLayout = field(default_factory=NodeLayout)
    problem: str | None = None

    @property
    def num_ranks_together(self) -> int:
        """On all machines."""
        return self.num_ranks * self.layout.num_nodes


Check = Callable[[Launch], Iterator[Checked]]
"""Says what is wrong, and may say what is right; without a word all is well. Raises as a run would."""
