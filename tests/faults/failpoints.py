"""Let each operation of a real save on 2 ranks fail, and prove that it costs this save alone.

`python tests/faults/failpoints.py` does it for all operations, with ENOSPC and EIO, in the way of
training and in the background, and writes benchmarks/results/failpoints.json. The operations are
those that a save is seen to do, so a new one is covered as soon as it exists.

A kill at an operation leaves one of the states in test_crash_states.py; what other ranks then do is
drawn in schedules.py, and kills.py kills real runs.
"""

import collections
import errno
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.campaign import parser_of, run_campaign
from faults.save_points import Point, Survey, Watch, plain, thinned
from ranks import run_ranks
from toy_runs import TOLD, Recipe, odd_model, run

from trainer.checkpoint import fsio

ERRORS = (errno.ENOSPC, errno.EIO)
FAILURES_PER_RUN = 40


def observe(world, run_dir, source, recipe):
    points = []
    fsio.observer = Watch(world.rank, run_dir, points.append)
    run(world, run_dir, source, recipe)
    return points


def points_of_a_save(run_dir, source, *, async_save):
    """Return the operations of a save that also rotates, on both ranks."""
    run_dir.mkdir()
    recipe = Recipe(total_steps=2, save_freq=1, keep=1, async_save=async_save)
    points = run_ranks(observe, 2, run_dir, source, recipe)
    return thinned([point for of_rank in points for point in of_rank if point.save == 2])


@dataclass(frozen=True)
class Failure:
    """The operation `point` raises the error `number`, in any save of its rank."""

    point: Point
    number: int

    def __str__(self):
        return f"{errno.errorcode[self.number]} in {self.point}"


@dataclass(frozen=True)
class Outcome:
    """One rank's report about the save of one step."""

    step: int
    is_saved: bool
    message: str = ""


def outcomes():
    """Return all reports of this rank's manager about its saves."""
    return [
        Outcome(step, True) if kind == "checkpoint" else Outcome(step, False, message)
        for kind, step, message in TOLD
    ]


def train_with_failures(world, run_dir, source, recipe, failures):
    """The saves of steps 2, 4, 6, ... meet `failures`. Return the outcomes and, on the main rank,
    the content of the run directory after each save.
    """
    surveys = []

    def act(point):
        if world.is_main and point.label == "phase open.begin":
            surveys.append(Survey.of(run_dir))
        if point.save not in range(2, recipe.total_steps, 2):
            return
        failure = failures[point.save // 2 - 1]
        if (point.rank, point.index) == (failure.point.rank, failure.point.index):
            assert point.label == failure.point.label, f"{failure} has become {point}"
            raise OSError(failure.number, os.strerror(failure.number))

    fsio.observer = Watch(world.rank, run_dir, act)
    run(world, run_dir, source, recipe)
    return outcomes(), [*surveys[1:], Survey.of(run_dir)]


def failing_saves(failures, run_dir, source, *, async_save):
    """Save at every step, every second time with the next of `failures`. Return all other faults."""
    run_dir.mkdir()
    recipe = Recipe(total_steps=2 * len(failures) + 1, save_freq=1, keep=1, async_save=async_save)
    (told, surveys), (others, _) = run_ranks(
        train_with_failures, 2, run_dir, source, recipe, failures
    )
    steps = [outcome.step for outcome in told]
    if told != others or steps != list(range(1, recipe.total_steps + 1)):
        return [f"not one save with one outcome at each step: {told} and {others}"]
    found = []
    for index, failure in zip(range(1, len(steps), 2), failures, strict=True):
        reasons = _faults_of(failure, told[index], surveys[index])
        step = steps[index + 1]
        if not told[index + 1].is_saved or surveys[index + 1] != Survey(step, (step,)):
            reasons.append(f"the save after it: {told[index + 1]}, {surveys[index + 1]}")
        found += [f"{failure}, async {async_save}: {reason}" for reason in reasons]
    return found


def _faults_of(failure, outcome, after):
    """Until the checkpoint is durable under its name, the save fails on all ranks and older
    checkpoints are unchanged. Afterwards it counts as saved.
    """
    step = outcome.step
    point = failure.point
    found = list(after.broken)
    if outcome.is_saved != point.is_after_commit:
        found.append(f"said of the save: {outcome}")
    has_name = point.is_after_commit or point.is_commit_sync
    if after.chosen != (step if has_name else step - 1) or after.chosen not in after.steps:
        found.append(f"step {after.chosen} would be continued, whole are {after.steps}")
    cause = (f"rank {point.rank}: ", os.strerror(failure.number), point.path)
    if not outcome.is_saved and not all(part in plain(outcome.message) for part in cause):
        found.append(f"the message does not name {cause}: {outcome.message}")
    kept = (step - 1, step) if has_name else (step - 1,)
    # The next save deletes what a rotation could not.
    if point.phase != "rotate" and (after.leftovers or after.steps != kept):
        found.append(f"left over: {after}")
    return found


def run_all(root, arguments):
    counts = collections.Counter()
    faults = []
    source = odd_model(root / "model")
    for async_save in (False, True):
        mode = "async" if async_save else "sync"
        points = points_of_a_save(root / mode, source, async_save=async_save)
        able = [point for point in points if point.can_fail]
        failures = [Failure(point, number) for point in able for number in ERRORS]
        for first in range(0, len(failures), FAILURES_PER_RUN):
            batch = failures[first : first + FAILURES_PER_RUN]
            faults += failing_saves(batch, root / "case", source, async_save=async_save)
            shutil.rmtree(root / "case")
            print(f"{mode}: {first + len(batch)}/{len(failures)}, faults: {faults}", flush=True)
        counts.update(f"{mode}, {errno.errorcode[f.number]}: {f.point.phase}" for f in failures)
    return {"cases": counts.total(), "counts": dict(counts), "faults": faults}


if __name__ == "__main__":
    from faults.failpoints import run_all as work  # the ranks know these classes by this name

    sys.exit(run_campaign("failpoints", parser_of(__doc__), sys.argv[1:], work))
