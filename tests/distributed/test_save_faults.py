"""Cases 11, 12, 14 and 15: the disk fails, or a rank stops, in the middle of a save of several
ranks.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
from faults.failpoints import (
    ERRORS,
    Failure,
    Outcome,
    failing_saves,
    outcomes,
    points_of_a_save,
)
from faults.save_points import Survey, Watch
from processes import wait_until
from ranks import _receive, started_ranks
from sweeps import some
from toy import ToySamples, build_toy_model, toy_run
from toy_runs import Recipe, checkpoint_manager, save_now
from toy_runs import source as source  # a fixture

from trainer.checkpoint import fsio
from trainer.checkpoint import save as saving
from trainer.checkpoint.save import GRACE_S
from trainer.errors import ResumableError

SAVE_TIMEOUT_S = 2
SHORT_GRACE_S = 1.0
NUM_FAILING = 24
PATIENCE_S = 30.0


@pytest.mark.parametrize("async_save", [False, True])
def test_an_error_at_any_operation_costs_one_save_on_all_ranks_alike(source, tmp_path, async_save):
    """Half of a sample of the operations fails in each mode, all of them with `pytest --full`.
    Every second save succeeds.

    `python tests/faults/failpoints.py` tries all operations, modes and errors.
    """
    points = points_of_a_save(tmp_path / "seen", source, async_save=async_save)
    able = [point for point in points if point.can_fail]
    assert len(able) > 80 and {point.rank for point in able} == {0, 1}
    half = some(able, NUM_FAILING)[async_save::2]
    failures = [Failure(point, ERRORS[number % 2]) for number, point in enumerate(half)]
    found = failing_saves(failures, tmp_path / "run", source, async_save=async_save)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Story:
    """The record of one rank: the duration of the save that was stopped, the outcomes of all saves,
    and the error that ended the run.
    """

    waited_s: float
    outcomes: list[Outcome]
    error: str = ""


def save_around_a_stop(world, run_dir, source, victim, label, *, async_save, grace_s):
    """Save step 1. In the save of step 2, the rank `victim` stops itself before the operation
    `label`. Then save step 3.

    A file `rank N` next to the run shows that the save of step 2 is over.
    """
    run_dir.mkdir(exist_ok=True)
    recipe = Recipe(async_save=async_save, save_timeout_s=SAVE_TIMEOUT_S)
    saving.GRACE_S = grace_s  # of this process alone
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=6)
    checkpoints = checkpoint_manager(world, run_dir, source, parts, recipe)

    def save(step, *, is_required):
        parts.batches.step = step
        save_now(checkpoints, parts, is_required=is_required)
        checkpoints.finish()

    def stop(point):
        if (world.rank, label) == (victim, point.label):
            fsio.observer = None
            # not a step further, in whatever thread
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    save(1, is_required=True)
    fsio.observer = Watch(world.rank, run_dir, stop)
    started = time.monotonic()
    try:
        save(2, is_required=False)
        waited_s = time.monotonic() - started
        run_dir.with_name(f"rank {world.rank}").touch()
        if victim != 0:
            save(3, is_required=True)
    except ResumableError as error:
        return Story(time.monotonic() - started, outcomes(), str(error))
    return Story(waited_s, outcomes())


@pytest.mark.parametrize(
    ("async_save", "label"),
    [
        (False, "write .staging_global_step_N/optim_world_size_3_rank_1.pt"),
        (True, "phase shards.report"),
        (True, "phase export.begin"),
    ],
)
def test_a_rank_that_stands_still_costs_one_save_and_is_named(source, tmp_path, async_save, label):
    """When the rank continues, it learns that its save was abandoned, and the next save succeeds."""
    run_dir = tmp_path / "run"
    settings = {"async_save": async_save, "grace_s": GRACE_S}
    with started_ranks(save_around_a_stop, 3, run_dir, source, 1, label, **settings) as ranks:
        for rank in (0, 2):
            assert wait_until((tmp_path / f"rank {rank}").exists)
        during = Survey.of(run_dir)
        os.kill(ranks[1][0].pid, signal.SIGCONT)
        stories = [_receive(receiver, rank, PATIENCE_S) for rank, (_, receiver) in enumerate(ranks)]
    assert during == Survey(1, (1,))
    for rank in (0, 2):
        assert SAVE_TIMEOUT_S - 0.1 < stories[rank].waited_s < SAVE_TIMEOUT_S + GRACE_S
    for story in stories:
        first, stopped, *_, last = story.outcomes
        assert (first, last, story.error) == (Outcome(1, True), Outcome(3, True), "")
        assert stopped.step == 2 and "did not answer in time" in stopped.message
    assert "rank 1 did not answer in time" in stories[0].outcomes[1].message
    assert Survey.of(run_dir) == Survey(3, (1, 3))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_main_rank_that_stands_still_ends_the_run_and_commits_nothing_late(
    source, tmp_path, async_save
):
    """Only the main rank knows whether the checkpoint exists, so the other ranks end resumable."""
    run_dir = tmp_path / "run"
    label = "phase commit.begin"
    settings = {"async_save": async_save, "grace_s": SHORT_GRACE_S}
    with started_ranks(save_around_a_stop, 2, run_dir, source, 0, label, **settings) as ranks:
        story = _receive(ranks[1][1], 1, PATIENCE_S)
        ranks[1][0].join(timeout=PATIENCE_S)
        assert ranks[1][0].exitcode == 0, "it cannot leave as long as the main rank stands still"
        during = Survey.of(run_dir)
        os.kill(ranks[0][0].pid, signal.SIGCONT)
        late = _receive(ranks[0][1], 0, PATIENCE_S)
    assert story.outcomes == [Outcome(1, True)]
    assert "cannot confirm that step 2 was saved: rank 0 did not answer in time" in story.error
    limit_s = SAVE_TIMEOUT_S + SHORT_GRACE_S
    assert limit_s - 0.1 < story.waited_s < limit_s + 5.0
    assert (during.chosen, during.steps, len(during.leftovers)) == (1, (1,), 1)
    assert "save took longer than" in late.outcomes[1].message
    assert Survey.of(run_dir) == Survey(1, (1,))
