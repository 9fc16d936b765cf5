"""Run the real selection on every state that a power loss may leave, and find broken promises."""

import os
import random
import shutil
from dataclasses import dataclass, field, replace

from crash_states import ACKNOWLEDGED, MOVED_BACK, WITHOUT_EFFECT, Disk, Tree, marked_step

from trainer.checkpoint import choice, layout
from trainer.checkpoint.manifest import verify_files


class Stage:
    """A directory that shows one state after another by changing only the differences."""

    def __init__(self, place):
        self.path = place / "run"
        self.path.mkdir(parents=True)
        self._now = {}

    def show(self, state):
        """Return the directory that holds `state`."""
        entries = dict(state)
        for name, tree in self._now.items():
            if entries.get(name) != tree:
                remove(self.path / name)
        for name, tree in entries.items():
            if self._now.get(name) != tree:
                build(self.path / name, tree)
        self._now = entries
        return self.path

    def forget(self):
        """Empty the directory, which the code under test has changed."""
        for name in os.listdir(self.path):
            remove(self.path / name)
        self._now = {}


def build(path, tree):
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, child in tree:
        build(path / name, child)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """The result of a start. step: the step it continues from, or None for a new run; error: the
    reason why it does not start; torn: incomplete checkpoints under a final name, with reasons.
    """

    step: int | None
    error: str = ""
    torn: tuple[str, ...] = ()


def start_from(run_dir, *, is_whole):
    """Do everything that a start does before it loads. `is_whole` judges without the code under
    test.
    """
    try:
        selection = choice.select(run_dir)
    except choice.NoUsableCheckpointError:
        return Outcome(None, "refuses to start")
    torn = [note for note in selection.notes if "skipped" in note]
    for info in selection.candidates:
        if not (problems := verify_files(info.path, info.manifest)):
            error = "" if is_whole(info.path) else f"accepts damaged bytes of {info.path.name}"
            return Outcome(info.step, error, tuple(torn))
        torn += [f"{info.path.name}: {problem}" for problem in problems]
    return Outcome(None, "all damaged" if selection.candidates else "", tuple(torn))


@dataclass(frozen=True)
class Promise:
    """A start must find `acknowledged` or a newer step, and none of the `abandoned` steps. `known`:
    all steps ever acknowledged.
    """

    acknowledged: int | None = None
    known: frozenset[int] = frozenset()
    abandoned: frozenset[int] = frozenset()

    def after(self, operation):
        if (step := marked_step(operation, ACKNOWLEDGED)) is not None:
            return Promise(step, self.known | {step}, self.abandoned - {step})
        if (step := marked_step(operation, MOVED_BACK)) is not None:
            return Promise(step, self.known, frozenset(s for s in self.known if s > step))
        if operation.kind == "rename" and operation.target is not None:
            reached = layout.parse_step(operation.target.name)
            return replace(self, abandoned=self.abandoned - {reached})
        return self

    def broken_by(self, outcome):
        """Return the fault of a start; empty if there is none."""
        step = outcome.step
        promised = self.acknowledged
        if outcome.error:
            return outcome.error
        if step in self.abandoned:
            return f"continues from the abandoned step {step}"
        if promised is not None and (step is None or step < promised):
            return f"continues from step {step}, step {promised} was acknowledged"
        return ""


@dataclass
class Report:
    """reached: every state with the promise that held when the power failed last; num_torn: states
    in which a checkpoint is broken under its final name, but was not broken at the start.
    """

    num_sampled_cuts: int = 0
    num_torn: int = 0
    faults: list[str] = field(default_factory=list)
    reached: dict[Tree, Promise] = field(default_factory=dict)

    def require_good(self):
        assert not self.faults, self.faults[0]
        assert self.num_torn == 0


class Explorer:
    """Judges all states of any number of logs, each state once."""

    def __init__(self, place, *, is_whole, max_combinations, seed=0):
        """If a cut has more than `max_combinations` states, that many are drawn by `seed`."""
        self.stage = Stage(place)
        self.outcomes = {}
        self._is_whole = is_whole
        self._max_combinations = max_combinations
        self._seed = seed

    def explore(self, log, start, root, promise, *, first=0):
        """Cut `log` before each operation from number `first` on, and after the last.

        root: the directory of the log, which held `start`; promise: what held before the log.
        """
        disk = Disk(start, root)
        report = Report()
        chance = random.Random(self._seed)
        torn_before = set(self.outcome(start).torn)
        is_changed = True
        for cut, operation in enumerate([*log, None]):
            if is_changed and cut >= first and not report.faults:
                self._judge(disk, promise, report, chance, torn_before, f"{cut}: {operation}")
            if operation is not None:
                disk.apply(operation)
                before = promise
                promise = promise.after(operation)
                is_changed = promise != before or operation.kind not in WITHOUT_EFFECT
        return report

    def _judge(self, disk, promise, report, chance, torn_before, place):
        is_sampled = disk.num_combinations() > self._max_combinations
        report.num_sampled_cuts += is_sampled
        for state in disk.sample(self._max_combinations, chance) if is_sampled else disk.states():
            if report.reached.get(state) == promise:
                continue
            outcome = self.outcome(state)
            is_torn = not torn_before.issuperset(outcome.torn)
            report.num_torn += is_torn and state not in report.reached
            report.reached[state] = promise
            if reason := promise.broken_by(outcome):
                report.faults.append(f"seed {self._seed}: {reason}, power lost before {place}")

    def outcome(self, state):
        if state not in self.outcomes:
            self.outcomes[state] = start_from(self.stage.show(state), is_whole=self._is_whole)
        return self.outcomes[state]


def visible(state):
    """Return the state without what a start ignores: staging, trash and temporary files."""
    return tuple((name, tree) for name, tree in state if not name.startswith("."))
