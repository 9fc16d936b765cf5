"""Tests of the conditions for a commit: all files as reported, synced, in time, and the lock held."""

import os
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ranks import run_ranks
from toy import ToySamples, build_toy_model, toy_run
from toy_runs import Recipe, checkpoint_manager, save_now
from toy_runs import source as source  # a fixture

from trainer.checkpoint import fsio, layout, save
from trainer.checkpoint.lock import LOCK, RunLock
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.save import Agreement
from trainer.errors import CannotWriteError
from trainer.runtime.progress import History, Position

STAGED_BY_OTHER = ".staging_global_step_9.0a1b2c3d"


def held_lock(world, run_dir):
    if not world.is_main:
        return None
    lock = RunLock(run_dir)
    lock.acquire()
    return lock


def is_manifest(world, operation):
    """Return True on the main rank when it begins the manifest."""
    is_created = operation.kind == "create" and operation.path.name == MANIFEST
    return bool(world.is_main and is_created)


def save_watched(world, run_dir, source, disturb, save_timeout_s):
    """Return the error of one save. `disturb(world, operation, run_dir)` is called before each
    operation.
    """
    run_dir.mkdir(exist_ok=True)
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=6)
    recipe = Recipe(save_timeout_s=save_timeout_s)
    lock = held_lock(world, run_dir)
    manager = checkpoint_manager(world, run_dir, source, parts, recipe, lock=lock)
    fsio.observer = lambda operation: disturb(world, operation, run_dir)
    save_now(manager, parts, is_required=False)
    fsio.observer = None
    dist.barrier()  # the ranks of a run do not leave one by one
    return manager._last_error


def replace_lock(run_dir):
    """Simulate a run that takes over."""
    (run_dir / "other").write_text("{}")
    os.replace(run_dir / "other", run_dir / LOCK)


def take_over(world, operation, run_dir):
    """Another run, which is saving too, replaces the lock file while the manifest is written."""
    if is_manifest(world, operation):
        replace_lock(run_dir)
        (run_dir / STAGED_BY_OTHER).mkdir()


def settle_and_roll_back(world, run_dir, source):
    """Return the errors of a run that was taken over when it points to a checkpoint, and when it
    rolls back to one.
    """
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=6)
    lock = held_lock(world, run_dir)
    manager = checkpoint_manager(world, run_dir, source, parts, Recipe(), lock=lock)
    batches = SimpleNamespace(step=40, last_step=60, follows=lambda earlier: True)
    for step in (10, 40):
        manager.save(Position(step), loss=1.0, grad_norm=1.0, history=History(), is_required=True)
    if world.is_main:
        replace_lock(run_dir)
    told = []
    for change in (
        lambda: manager.settle(10, History()),
        lambda: manager.decide_rollback(batches, onset=30, history=History(), reason="a spike"),
    ):
        with pytest.raises(CannotWriteError) as error:
            change()
        told.append(str(error.value))
    return told


def test_a_run_that_was_taken_over_changes_no_checkpoint_of_the_other(source, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for told in run_ranks(settle_and_roll_back, 2, run_dir, source):
        assert all("another run has taken it over" in text for text in told)
    assert layout.read_pointer(run_dir).step == 40
    assert [info.step for info in layout.committed(run_dir)] == [10, 40]


def truncate_after_report(world, operation, run_dir):
    save.VISIBLE_WITHIN_S = 0.2
    if world.rank == 1 and operation.kind == "phase" and operation.path.name == "export.report":
        (shard,) = run_dir.glob(".staging_global_*/optim_world_size_2_rank_1.pt")
        os.truncate(shard, 1000)


def dawdle(world, operation, run_dir):
    if is_manifest(world, operation):
        time.sleep(2.2)


DISTURBED = {
    take_over: (30, "another run has taken it over", [STAGED_BY_OTHER]),
    truncate_after_report: (30, "optim_world_size_2_rank_1.pt has 1000 bytes", []),
    dawdle: (2, "save took longer than", []),
}
"""{what happens in a save: (its time limit, a part of the error, what is staged afterwards)}"""


@pytest.mark.covers("S3.53")
@pytest.mark.parametrize("disturb", DISTURBED)
def test_a_disturbed_save_is_not_committed(source, tmp_path, disturb):
    limit_s, said, staged = DISTURBED[disturb]
    run_dir = tmp_path / "run"
    for error in run_ranks(save_watched, 2, run_dir, source, disturb, limit_s):
        assert said in error
    assert layout.checkpoints(run_dir) == []
    assert [path.name for path in run_dir.glob(".staging*")] == staged


def agree_after_a_late_answer(world):
    agreement = Agreement(world, timeout_s=20.0)
    if not world.is_main:
        agreement._give_up()
    agreement.renew()
    return agreement.agree(value=world.rank, error=None, deadline=time.monotonic() + 20.0)


def test_ranks_agree_again_after_one_alone_gave_up_its_group():
    assert run_ranks(agree_after_a_late_answer, 2) == [[0, 1], [0, 1]]
