"""Runs the real selection on every state that a power loss may leave, and says where it breaks
a promise.
"""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from crash_states import ACKNOWLEDGED, MOVED_BACK, WITHOUT_EFFECT, Disk, Tree, marked_step

from trainer.checkpoint import choice, layout
from trainer.checkpoint.fsio import Operation
from trainer.checkpoint.manifest import verify_files

ENOUGH_FAULTS = 1000
"""The rest of a log that is so bad is not looked at."""


class Stage:
    """A directory that is made to hold one state after the other, changing only what differs."""

    def __init__(self, place: Path) -> None:
        self.path, self._contents = place / "run", place / "contents"
        self.path.mkdir(parents=True)
        self._contents.mkdir()
        self._files: dict[bytes, str] = {}
        self._now: dict[str, Tree] = {}

    def show(self, state: Tree) -> Path:
        """The directory that holds `state`; its files are links, to be replaced or removed but
        never written into.
        """
        assert not isinstance(state, bytes), "a state is a directory"
        entries = dict(state)
        for name, tree in self._now.items():
            if entries.get(name) != tree:
                remove(self.path / name)
        for name, tree in entries.items():
            if self._now.get(name) != tree:
                self._build(f"{self.path}/{name}", tree)
        self._now = entries
        return self.path

    def forget(self) -> None:
        """Someone has changed the directory: the next state is made from nothing."""
        for name in os.listdir(self.path):
            remove(self.path / name)
        self._now = {}

    def _build(self, path: str, tree: Tree) -> None:
        if not isinstance(tree, bytes):
            os.mkdir(path)
            for name, child in tree:
                self._build(f"{path}/{name}", child)
            return
        if tree not in self._files:
            self._files[tree] = f"{self._contents}/{len(self._files)}"
            Path(self._files[tree]).write_bytes(tree)
        os.link(self._files[tree], path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@dataclass(frozen=True)
class Outcome:
    """What a start finds. `step`: continued from, None = a new run. `error`: why it does not start
    instead.

    `torn`: what a checkpoint's name promises whole and is not, with the reason.
    """

    step: int | None
    error: str = ""
    torn: tuple[str, ...] = ()


def start_from(run_dir: Path, *, is_whole: Callable[[Path], bool]) -> Outcome:
    """What a resuming run does before it loads. `is_whole` knows the bytes without the code
    under test.
    """
    try:
        selection = choice.select(run_dir)
    except choice.NoUsableCheckpointError:
        return Outcome(None, "refuses to start")
    torn = [note for note in selection.notes if "passed over" in note]
    for info in selection.candidates:
        if info.manifest is None:
            return Outcome(None, "refuses a directory without a manifest")
        if not (problems := verify_files(info.path, info.manifest)):
            error = (
                "" if is_whole(info.path) else f"took damaged bytes of {info.path.name} for whole"
            )
            return Outcome(info.step, error, tuple(torn))
        torn += [f"{info.path.name}: {problem}" for problem in problems]
    return Outcome(
        None, "refuses to start, all damaged" if selection.candidates else "", tuple(torn)
    )


@dataclass(frozen=True)
class Promise:
    """What a start must find: `acknowledged` or a newer step, none of the `abandoned`.

    `known`: all steps ever acknowledged.
    """

    acknowledged: int | None = None
    known: frozenset[int] = frozenset()
    abandoned: frozenset[int] = frozenset()

    def after(self, operation: Operation) -> "Promise":
        if (step := marked_step(operation, ACKNOWLEDGED)) is not None:
            return Promise(step, self.known | {step}, self.abandoned - {step})
        if (step := marked_step(operation, MOVED_BACK)) is not None:
            return Promise(step, self.known, frozenset(s for s in self.known if s > step))
        if operation.kind == "rename" and operation.target is not None and self.abandoned:
            return replace(
                self, abandoned=self.abandoned - {layout.parse_step(operation.target.name)}
            )
        return self

    def broken_by(self, outcome: Outcome) -> str:
        """Why this is no way to start; empty if it is one."""
        if outcome.error:
            return outcome.error
        if outcome.step is None:
            return (
                ""
                if self.acknowledged is None
                else f"starts anew, step {self.acknowledged} was acknowledged"
            )
        if outcome.step in self.abandoned:
            return f"continues from the abandoned step {outcome.step}"
        if self.acknowledged is not None and outcome.step < self.acknowledged:
            return f"continues from step {outcome.step}, step {self.acknowledged} was acknowledged"
        return ""


@dataclass(frozen=True)
class Fault:
    """A state that breaks a promise: why, before which operation the power failed, and what was
    left.
    """

    reason: str
    place: str
    state: Tree

    def __str__(self) -> str:
        return f"{self.reason}\n  power lost before operation {self.place}\n{listing(self.state)}"


def listing(tree: Tree, indent: str = "  ") -> str:
    """Names and sizes, one a line; the content of what is short."""
    assert not isinstance(tree, bytes)
    lines = []
    for name, child in tree:
        if isinstance(child, bytes):
            lines.append(
                f"{indent}{name}  {len(child)} bytes" + (f" {child!r}" if len(child) < 20 else "")
            )
        else:
            lines += [f"{indent}{name}/", *([listing(child, indent + "  ")] if child else [])]
    return "\n".join(lines)


@dataclass
class Report:
    """Of one log. `reached`: every different state with the promise that held when the power failed
    last.

    `num_torn` counts the states where a checkpoint's name stands on something broken that was not
    so at the start.
    """

    num_cuts: int = 0
    num_sampled_cuts: int = 0
    num_torn: int = 0
    faults: list[Fault] = field(default_factory=list)
    reached: dict[Tree, Promise] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{len(self.reached)} states at {self.num_cuts} cuts ({self.num_sampled_cuts} "
            f"sampled), {len(self.faults)} faults, {self.num_torn} torn"
        )


class Explorer:
    """Judges all states of any number of logs; a state met before is not looked at again."""

    def __init__(
        self,
        place: Path,
        *,
        is_whole: Callable[[Path], bool],
        max_combinations: int = 2**14,
        seed: int = 0,
    ) -> None:
        """Of a cut with more than `max_combinations`, as many are drawn by `seed`; of others
        all are looked at.
        """
        self.stage = Stage(place)
        self.outcomes: dict[Tree, Outcome] = {}
        self._is_whole, self._max_combinations, self._seed = is_whole, max_combinations, seed

    def explore(
        self, log: Sequence[Operation], start: Tree, root: Path, promise: Promise, *, first: int = 0
    ) -> Report:
        """Cut `log` before each operation from number `first` on and after the last.

        `root`: the directory it was recorded in, which held `start`; `promise`: what held before
        the first operation.
        """
        disk, report, chance = Disk(start, root), Report(), random.Random(self._seed)
        is_changed = True
        for cut in range(len(log) + 1):
            if len(report.faults) >= ENOUGH_FAULTS:
                break
            if is_changed and cut >= first:
                place = (
                    f"{cut}: {log[cut].kind} {log[cut].path}" if cut < len(log) else "was the end"
                )
                self._judge(
                    disk, promise, report, chance, place, torn_before=self.outcome(start).torn
                )
            if cut < len(log):
                disk.apply(log[cut])
                before, promise = promise, promise.after(log[cut])
                is_changed = promise != before or log[cut].kind not in WITHOUT_EFFECT
        return report

    def _judge(
        self,
        disk: Disk,
        promise: Promise,
        report: Report,
        chance: random.Random,
        place: str,
        *,
        torn_before: tuple[str, ...],
    ) -> None:
        """Look at what a power loss may leave of `disk` now."""
        is_sampled = disk.num_combinations() > self._max_combinations
        report.num_cuts += 1
        report.num_sampled_cuts += is_sampled
        for state in disk.sample(self._max_combinations, chance) if is_sampled else disk.states():
            if report.reached.get(state) == promise:
                continue
            outcome = self.outcome(state)
            report.num_torn += state not in report.reached and not set(torn_before).issuperset(
                outcome.torn
            )
            report.reached[state] = promise
            if reason := promise.broken_by(outcome):
                report.faults.append(Fault(reason, place, state))
                if len(report.faults) >= ENOUGH_FAULTS:
                    break

    def outcome(self, state: Tree) -> Outcome:
        if state not in self.outcomes:
            self.outcomes[state] = start_from(self.stage.show(state), is_whole=self._is_whole)
        return self.outcomes[state]


def visible(state: Tree) -> Tree:
    """Without what a start ignores by name: staging, trash and temporary files."""
    assert not isinstance(state, bytes)
    return tuple((name, tree) for name, tree in state if not name.startswith("."))
