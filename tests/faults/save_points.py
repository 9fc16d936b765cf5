"""What a save does, operation by operation, as seen on one rank; and what a run directory then
holds.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from faults.announced import ACKS
from toy_runs import TRACE

from trainer.checkpoint import choice, fsio, layout
from trainer.checkpoint.fsio import Operation
from trainer.checkpoint.lock import LOCK
from trainer.checkpoint.manifest import MANIFEST, verify_files

_STEP = re.compile(r"global_step_\d+")
_NONCE = re.compile(r"\.[0-9a-f]{8}(?=$|[ '/]|\.tmp)")


@dataclass(frozen=True)
class Point:
    """The operation number `index` of the `save`-th save of a rank; save 0 is the start, until the
    first save.

    `phase` is what it belongs to, `label` says what it is, equal in every run; `is_behind`:
    training goes on meanwhile.
    """

    rank: int
    save: int
    index: int
    phase: str
    label: str
    is_behind: bool

    @property
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.save, self.index

    @property
    def is_write(self) -> bool:
        return self.label.startswith("write ")

    @property
    def is_commit(self) -> bool:
        return self.label == "rename .staging_global_step_N -> global_step_N"

    @property
    def is_commit_sync(self) -> bool:
        """The checkpoint has its name, and is durable with this."""
        return self.label == "fsync_dir . after the commit"

    @property
    def is_after_commit(self) -> bool:
        return self.phase in ("publish", "rotate")

    @property
    def can_fail(self) -> bool:
        """Whether it is an operation of a save that touches the disk."""
        return self.save > 0 and not self.label.startswith("phase ")

    @property
    def path(self) -> str:
        """Relative to the run directory, empty for itself."""
        return self.label.split(" ")[1].removesuffix(".")

    @property
    def is_key(self) -> bool:
        """Whether it changes what names say, orders what is durable, or passes a word to the
        other ranks.
        """
        touches_name = any(
            name in self.label for name in (MANIFEST, layout.POINTER, layout.PUBLISHED)
        )
        return self.save > 0 and (
            touches_name or not self.label.startswith(("create ", "write ", "fsync ", "close "))
        )


def plain(text: str) -> str:
    """Without what differs from run to run."""
    return _NONCE.sub("", _STEP.sub("global_step_N", text))


class Watch:
    """An observer that knows where its rank is, and hands every operation on as a `Point`
    before it happens.
    """

    def __init__(self, rank: int, run_dir: Path, act: Callable[[Point], None]) -> None:
        self._rank, self._run_dir, self._act = rank, run_dir, act
        self._save, self._index, self._phase, self._is_committed = 0, 0, "start", False

    def __call__(self, operation: Operation) -> None:
        if operation.kind == "phase":
            self._phase = operation.path.name.partition(".")[0]
            if operation.path.name == "open.begin":
                self._save, self._index = self._save + 1, 0
        elif self._phase == "publish" and self._is_rotation(operation):
            self._phase = "rotate"
        is_behind = threading.current_thread() is not threading.main_thread()
        label = self._label(operation) + " after the commit" * self._is_committed
        point = Point(self._rank, self._save, self._index, self._phase, label, is_behind)
        self._index += 1
        if self._is_committed:
            self._phase = "publish"
        self._is_committed = point.is_commit
        self._act(point)

    @staticmethod
    def _is_rotation(operation: Operation) -> bool:
        return (
            operation.kind in ("rename", "unlink", "rmdir")
            and layout.POINTER not in operation.path.name
        )

    def _label(self, operation: Operation) -> str:
        path = (
            operation.path.relative_to(self._run_dir)
            if operation.path.is_absolute()
            else operation.path
        )
        target = f" -> {operation.target.name}" if operation.target is not None else ""
        return plain(f"{operation.kind} {path}{target}")


def thinned(points: Sequence[Point]) -> list[Point]:
    """All operations but the writes, and of the writes of each file the first, the middle and the
    last.

    Between them the staged file only grows, and nothing reads it.
    """
    kept = []
    for is_write, group in groupby(points, key=lambda point: point.label if point.is_write else ""):
        run = list(group)
        kept += (
            [run[index] for index in sorted({0, len(run) // 2, len(run) - 1})] if is_write else run
        )
    return kept


@dataclass(frozen=True)
class Survey:
    """What a run directory holds. `steps`: of whole checkpoints; `broken`: what has such a name
    and is not whole.
    """

    chosen: int | None
    steps: tuple[int, ...]
    broken: tuple[str, ...]
    leftovers: tuple[str, ...]

    @classmethod
    def of(cls, run_dir: Path) -> "Survey":
        steps, broken = [], []
        for info in layout.checkpoints(run_dir):
            if info.manifest is None or verify_files(info.path, info.manifest):
                broken.append(f"{info.path.name} ({info.status} {info.reason})")
            else:
                steps.append(info.step)
        chosen = choice.select(run_dir).chosen
        visible = (TRACE, ACKS, layout.POINTER, LOCK)
        leftovers = [
            n for n in fsio.list_dir(run_dir) if n not in visible and layout.parse_step(n) is None
        ]
        return cls(chosen.step if chosen else None, tuple(steps), tuple(broken), tuple(leftovers))
