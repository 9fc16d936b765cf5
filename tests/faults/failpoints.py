"""Kill a rank right before each operation of a real save, or let the operation fail, and prove that
nothing is lost.

`python tests/faults/failpoints.py` does it for all operations, in both modes, and writes
benchmarks/results/failpoints.json. The operations are not a list kept by hand but what a save was
seen to do, so a new one is covered as soon as it exists. Ranks are real processes with the
project's own parts (gloo, toy model).
"""

import argparse
import collections
import errno
import json
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from faults.announced import ACKS, train
from faults.save_points import Point, Survey, Watch, plain, thinned
from ranks import run_ranks, started_ranks
from result_file import write_result
from toy import write_model_config
from toy_runs import TOLD, TRACE, Recipe, read_trace, run

from trainer.checkpoint import choice, fsio, layout
from trainer.runtime.distributed import World

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "failpoints.json"
RECIPE = Recipe(total_steps=8, save_freq=2, keep=1, has_trace=True)
OLD, NEW = 4, 6
"""The step that every case continues from, and that of the save in which it strikes. Training
goes on behind it.
"""
STRUCK_WITHIN_S = 60.0
ERRORS = (errno.ENOSPC, errno.EIO)
FAILURES_PER_RUN = 40
RESUME_EVERY = 20


def observe(world: World, run_dir: Path, source: Any, recipe: Recipe) -> list[Point]:
    """Every operation of this rank until its first save is over."""
    points: list[Point] = []
    fsio.observer = Watch(world.rank, run_dir, points.append)
    train(world, run_dir, source, recipe)
    return [point for point in points if point.save <= 1]


def train_until(world: World, run_dir: Path, source: Any, recipe: Recipe, last: Point) -> None:
    """Die right before the operation `last`."""

    def act(point: Point) -> None:
        if point.place == last.place:
            assert point == last, f"{last} has become {point}"
            os.kill(os.getpid(), signal.SIGKILL)

    fsio.observer = Watch(world.rank, run_dir, act)
    train(world, run_dir, source, recipe)


class Scene:
    """The straight run, and the directory that every case gets a copy of, as a crash before its
    publishing left it.

    It holds the checkpoints of steps 2 and 4, the pointer at 2, and a half-written staging
    directory, so that a start repairs, publishes and rotates before it trains.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.source = write_model_config(root / "model", vocab_size=163, intermediate_size=97)
        straight, self._prepared = root / "straight", root / "prepared"
        straight.mkdir()
        run_ranks(train, 2, straight, self.source, replace(RECIPE, keep=None))
        self.rows = {row["step"]: row for row in read_trace(straight)}
        for step in (2, OLD):
            shutil.copytree(
                straight / f"global_step_{step}", self._prepared / f"global_step_{step}"
            )
        (self._prepared / f"global_step_{OLD}" / layout.PUBLISHED).unlink()
        (self._prepared / layout.POINTER).write_text("2")
        (self._prepared / ACKS).write_text("2\n")
        (self._prepared / TRACE).write_text(
            "".join((straight / TRACE).read_text().splitlines(keepends=True)[:OLD])
        )
        shutil.copytree(
            straight / "global_step_2", self._prepared / ".staging_global_step_6.0123abcd"
        )

    def copy_to(self, run_dir: Path) -> Path:
        return Path(shutil.copytree(self._prepared, run_dir))


class Matrix:
    """The cases of one mode: what its first save was seen to do, and the kills right before
    each of it.
    """

    def __init__(self, scene: Scene, run_dir: Path, *, async_save: bool) -> None:
        self.recipe = replace(RECIPE, async_save=async_save)
        self.source, self._scene = scene.source, scene
        points = run_ranks(observe, 2, scene.copy_to(run_dir), self.source, self.recipe)
        self.points: list[Point] = [point for of_rank in points for point in of_rank]
        self._commit_index = next(point.index for point in self.points if point.is_commit)

    def kill(self, point: Point, run_dir: Path, *, resumes: bool = False) -> list[str]:
        """Let the rank of `point` die there and the other shortly after; what is wrong then,
        each with the case.
        """
        self._scene.copy_to(run_dir)
        with started_ranks(train_until, 2, run_dir, self.source, self.recipe, point) as ranks:
            victim, other = ranks[point.rank][0], ranks[1 - point.rank][0]
            victim.join(timeout=STRUCK_WITHIN_S)
            is_struck = victim.exitcode == -signal.SIGKILL
            # as the launcher does: when a rank is lost, the others are killed
            other.join(timeout=random.Random(repr(point)).uniform(0.0, 0.1))
        found = (
            self.faults_in(run_dir, point)
            if is_struck
            else ["the rank did not come to this operation"]
        )
        if resumes and not found:
            found = self._resume(run_dir)
        mode = "async" if self.recipe.async_save else "sync"
        return [f"{mode}, killed before {point}: {fault}" for fault in found]

    def faults_in(self, run_dir: Path, point: Point) -> list[str]:
        """Where the directory breaks a promise after a kill at `point`."""
        try:
            survey = Survey.of(run_dir)
        except choice.NoUsableCheckpointError as error:
            return [str(error)]
        found = [f"{name} is not whole" for name in survey.broken]
        announced = max(int(line) for line in (run_dir / ACKS).read_text().split())
        if survey.chosen is None or survey.chosen < announced:
            found.append(
                f"step {announced} was announced as saved, {survey.chosen} would be continued"
            )
        if survey.chosen not in self._allowed(point):
            found.append(f"step {survey.chosen} would be continued, not {self._allowed(point)}")
        if survey.chosen not in survey.steps:
            found.append(f"step {survey.chosen} would be continued and is not whole")
        return found + self._strayed(run_dir)

    def _allowed(self, point: Point) -> tuple[int, ...]:
        """Steps to continue from: only what this rank knows is sure, the others were where they
        were.
        """
        if point.save == 0:
            return (OLD,)
        if point.rank == 0:
            return (NEW,) if point.index > self._commit_index else (OLD,)
        if point.label == "phase commit.agreed":
            return (NEW,)
        return (
            (OLD, NEW) if point.phase == "commit" or point.label == "phase ready.agreed" else (OLD,)
        )

    def _strayed(self, run_dir: Path) -> list[str]:
        rows = read_trace(run_dir)
        return [
            f"step {row['step']} diverged: {row}"
            for row in rows
            if row != self._scene.rows[row["step"]]
        ]

    def _resume(self, run_dir: Path) -> list[str]:
        """Train on from what the case left to the end: as if nothing had happened, and nothing
        left over.
        """
        run_ranks(train, 2, run_dir, self.source, self.recipe)
        found, survey = self._strayed(run_dir), Survey.of(run_dir)
        if {row["step"] for row in read_trace(run_dir)} != set(self._scene.rows):
            found.append("steps are missing in the trace after the resume")
        if survey != Survey(RECIPE.total_steps, (RECIPE.total_steps,), (), ()):
            found.append(f"after the resume: {survey}")
        return found


@dataclass(frozen=True)
class Failure:
    """`point` is an operation of any save of its rank; instead of it the error `number` is
    raised.
    """

    point: Point
    number: int

    def __str__(self) -> str:
        return f"{errno.errorcode[self.number]} in {self.point}"


@dataclass(frozen=True)
class Outcome:
    """What a rank said about the save of one step; `message` is empty if it is saved."""

    step: int
    is_saved: bool
    message: str = ""


class Outcomes(logging.Handler):
    """Keeps what the manager of this rank says about its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Outcome] = []
        TOLD.setLevel(logging.INFO)
        TOLD.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        kind, step, message = record.args  # type: ignore[misc]
        is_saved = kind == "checkpoint"
        self.found.append(Outcome(int(step), is_saved, "" if is_saved else str(message)))  # type: ignore[call-overload]


def train_with_failures(
    world: World, run_dir: Path, source: Any, recipe: Recipe, failures: Sequence[Failure]
) -> tuple[list[Outcome], list[Survey]]:
    """The saves of steps 2, 4, 6, ... meet `failures`; (outcomes, on the main rank what lay
    there after each save).
    """
    outcomes, surveys = Outcomes(), []

    def act(point: Point) -> None:
        if world.is_main and point.label == "phase open.begin":
            surveys.append(Survey.of(run_dir))
        failure = (
            failures[point.save // 2 - 1] if point.save in range(2, recipe.total_steps, 2) else None
        )
        if failure is not None and (point.rank, point.index) == (
            failure.point.rank,
            failure.point.index,
        ):
            assert point.label == failure.point.label, f"{failure} has become {point}"
            raise OSError(failure.number, os.strerror(failure.number))

    fsio.observer = Watch(world.rank, run_dir, act)
    run(world, run_dir, source, recipe)
    return outcomes.found, [*surveys[1:], Survey.of(run_dir)]


def failing_saves(
    failures: Sequence[Failure], run_dir: Path, source: Any, *, async_save: bool
) -> list[str]:
    """Train with a save at every step, every second one with the next of `failures`; what goes
    wrong beyond that.
    """
    run_dir.mkdir()
    recipe = Recipe(total_steps=2 * len(failures) + 1, save_freq=1, keep=1, async_save=async_save)
    (outcomes, surveys), (others, _) = run_ranks(
        train_with_failures, 2, run_dir, source, recipe, failures
    )
    mode = "async" if async_save else "sync"
    found = [
        f"{mode}: rank 0 says {ours}, rank 1 {other}"
        for ours, other in zip(outcomes, others, strict=False)
        if ours != other
    ]
    steps = [[outcome.step for outcome in of_rank] for of_rank in (outcomes, others)]
    if steps != [list(range(1, recipe.total_steps + 1))] * 2:
        return [*found, f"{mode}: not one save at each step: {steps}"]
    for number, failure in enumerate(failures):
        index = 2 * number + 1
        reasons = _faults_of(failure, outcomes[index], surveys[index])
        reasons += _faults_of_good(outcomes[index + 1], surveys[index + 1])
        found += [f"{mode}, {failure}: {reason}" for reason in reasons]
    return found


def _faults_of(failure: Failure, outcome: Outcome, after: Survey) -> list[str]:
    """Until it is durable under its name the save fails everywhere and the older ones stand;
    then it is saved.
    """
    step, found = outcome.step, [f"{name} is not whole" for name in after.broken]
    if outcome.is_saved != failure.point.is_after_commit:
        found.append(
            f"the save is said to have {'succeeded' if outcome.is_saved else 'failed'}: "
            f"{outcome.message}"
        )
    has_name = failure.point.is_after_commit or failure.point.is_commit_sync
    if after.chosen != (step if has_name else step - 1) or after.chosen not in after.steps:
        found.append(f"step {after.chosen} would be continued, whole are {after.steps}")
    if not outcome.is_saved:
        cause = (f"rank {failure.point.rank}: ", os.strerror(failure.number), failure.point.path)
        found += [
            f"the message lacks {part!r}: {outcome.message}"
            for part in cause
            if part not in plain(outcome.message)
        ]
    is_rotated = failure.point.phase == "rotate"  # the next save frees what could not be deleted
    if not is_rotated and (
        after.leftovers or after.steps != ((step - 1, step) if has_name else (step - 1,))
    ):
        found.append(f"left over: {after}")
    return found


def _faults_of_good(outcome: Outcome, after: Survey) -> list[str]:
    is_right = outcome.is_saved and after == Survey(outcome.step, (outcome.step,), (), ())
    return [] if is_right else [f"the save after it: {outcome}, {after}"]


def run_all(root: Path, *, every_write: bool) -> tuple[dict[str, int], list[str]]:
    """Both modes, kills and errors: (cases per mode, action and phase; faults)."""
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    scene = Scene(root / "scene")
    for mode, async_save in (("sync", False), ("async", True)):
        matrix = Matrix(scene, root / mode, async_save=async_save)
        points = matrix.points if every_write else thinned(matrix.points)
        for number, point in enumerate(points):
            resumes = number % RESUME_EVERY == 0
            faults += matrix.kill(point, root / "case", resumes=resumes)
            shutil.rmtree(root / "case")
            counts[f"{mode}, killed: {point.phase}"] += 1
            counts[f"{mode}, resumed to the end"] += resumes
            if number % 20 == 0:
                print(f"{mode}: {number}/{len(points)} killed, faults: {faults}", flush=True)
        failures = [
            Failure(point, number) for point in points for number in ERRORS if point.can_fail
        ]
        for first in range(0, len(failures), FAILURES_PER_RUN):
            batch = failures[first : first + FAILURES_PER_RUN]
            faults += failing_saves(batch, root / "case", matrix.source, async_save=async_save)
            shutil.rmtree(root / "case")
        counts.update(f"{mode}, {errno.errorcode[f.number]}: {f.point.phase}" for f in failures)
    return dict(counts), faults


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--every-write",
        action="store_true",
        help="strike at all writes of a file, not only at three",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="failpoints-", dir=os.environ.get("KILLS_DIR")
    ) as directory:
        counts, faults = run_all(Path(directory), every_write=arguments.every_write)
    result = {
        "command": " ".join(["python tests/faults/failpoints.py", *argv]),
        "cases": sum(count for name, count in counts.items() if "resumed" not in name),
        "counts": counts,
        "faults": faults,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    write_result(arguments.output, result)
    print(json.dumps(result, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    from faults.failpoints import main  # the ranks know these classes by this name

    sys.exit(main(sys.argv[1:]))
