"""The operations of a save as one rank sees them, and the contents of a run directory."""

import re
from dataclasses import dataclass
from itertools import groupby

from toy_runs import TRACE

from trainer.checkpoint import choice, fsio, layout
from trainer.checkpoint.lock import LOCK
from trainer.checkpoint.manifest import verify_files

_STEP = re.compile(r"global_step_\d+")
_NONCE = re.compile(r"\.[0-9a-f]{8}(?=$|[ '/]|\.tmp)")


@dataclass(frozen=True)
class Point:
    """Operation number `index` in save number `save` of a rank. Save 0 is the time until the first
    save.

    `phase`: the phase that contains it; `label`: a description that is equal in every run.
    """

    rank: int
    save: int
    index: int
    phase: str
    label: str

    @property
    def is_write(self):
        return self.label.startswith("write ")

    @property
    def is_commit(self):
        return self.label == "rename .staging_global_step_N -> global_step_N"

    @property
    def is_commit_sync(self):
        """True for the sync of the checkpoint's name, at which the name already exists."""
        return self.label == "fsync_dir . after the commit"

    @property
    def is_after_commit(self):
        return self.phase in ("publish", "rotate")

    @property
    def can_fail(self):
        """True for an operation that touches the disk."""
        return not self.label.startswith("phase ")

    @property
    def path(self):
        """Relative to the run directory; empty for the run directory itself."""
        return self.label.split(" ")[1].removesuffix(".")


def plain(text):
    """Remove the parts that differ between runs."""
    return _NONCE.sub("", _STEP.sub("global_step_N", text))


class Watch:
    """An observer that passes every operation on as a `Point` before it happens."""

    def __init__(self, rank, run_dir, act):
        self._rank = rank
        self._run_dir = run_dir
        self._act = act
        self._save = 0
        self._index = 0
        self._phase = "start"
        self._is_committed = False

    def __call__(self, operation):
        if operation.kind == "phase":
            self._phase = operation.path.name.partition(".")[0]
            if operation.path.name == "open.begin":
                self._save = self._save + 1
                self._index = 0
        elif self._phase == "publish" and self._is_rotation(operation):
            self._phase = "rotate"
        label = self._label(operation) + " after the commit" * self._is_committed
        point = Point(self._rank, self._save, self._index, self._phase, label)
        self._index += 1
        if self._is_committed:
            self._phase = "publish"
        self._is_committed = point.is_commit
        self._act(point)

    @staticmethod
    def _is_rotation(operation):
        is_change = operation.kind in ("rename", "unlink", "rmdir")
        return is_change and layout.POINTER not in operation.path.name

    def _label(self, operation):
        path = operation.path
        if path.is_absolute():
            path = path.relative_to(self._run_dir)
        target = f" -> {operation.target.name}" if operation.target is not None else ""
        return plain(f"{operation.kind} {path}{target}")


def thinned(points):
    """Return all operations except writes, and the first, middle and last write of each file.

    Between these writes the staged file only grows, and nothing reads it.
    """
    kept = []
    for is_write, group in groupby(points, key=lambda point: point.label if point.is_write else ""):
        run = list(group)
        few = [run[index] for index in sorted({0, len(run) // 2, len(run) - 1})]
        kept += few if is_write else run
    return kept


@dataclass(frozen=True)
class Survey:
    """The contents of a run directory. steps: steps of whole checkpoints; broken: names of broken
    ones.
    """

    chosen: int | None
    steps: tuple[int, ...]
    broken: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()

    @classmethod
    def of(cls, run_dir):
        steps = []
        broken = []
        for info in layout.checkpoints(run_dir):
            if info.manifest is None or verify_files(info.path, info.manifest):
                broken.append(f"{info.path.name} ({info.status} {info.reason})")
            else:
                steps.append(info.step)
        chosen = choice.select(run_dir).chosen
        known = (TRACE, layout.POINTER, LOCK)
        names = [name for name in fsio.list_dir(run_dir) if layout.parse_step(name) is None]
        leftovers = tuple(name for name in names if name not in known)
        return cls(chosen.step if chosen else None, tuple(steps), tuple(broken), leftovers)
