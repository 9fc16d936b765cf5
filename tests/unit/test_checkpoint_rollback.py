"""A run reads its rollbacks exactly as written, and never guesses them."""

from dataclasses import replace
from functools import partial

import pytest
from checkpoint_fakes import rewrite_manifest, save
from ranks import run_ranks
from toy import ToySamples
from toy_runs import Recipe, begin, trainer_config

from trainer.checkpoint import layout, rollback
from trainer.config import ConfigError
from trainer.data.batch_plan import Schedule, Share
from trainer.data.loader import TrainLoader
from trainer.runtime.progress import History, Position, Rollbacks


def test_a_rollback_that_was_only_decided_is_completed(tmp_path):
    save(tmp_path, 10, 30)
    target = layout.inspect(tmp_path / "global_step_10")
    decided = rollback.decide(
        tmp_path, target, onset=30, found_step=32, last_step=90, reason="diverged"
    )
    assert decided.skipped_steps == frozenset(range(22, 41))
    # as if killed right after deciding
    (tmp_path / ".discarded_global_step_30.0").rename(tmp_path / "global_step_30")
    layout.publish(tmp_path, 30)
    rollback.complete(tmp_path)
    assert rollback.read(tmp_path) == decided and layout.read_pointer(tmp_path).step == 10
    assert [info.step for info in layout.checkpoints(tmp_path)] == [10]


@pytest.mark.parametrize("text", ["{", "{}", '{"rollbacks": [{"onset": 1}]}', '{"rollbacks": [1]}'])
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path, text):
    (tmp_path / rollback.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*rollbacks\.json"):
        rollback.read(tmp_path)


def rollbacks_at_start(world, run_dir, fingerprints, **changes):
    """Start a run and save nothing."""
    config = replace(trainer_config(run_dir, Recipe()), **changes)
    begun = begin(config, fingerprints, world, total_steps=99)
    begun.lock.release()
    assert rollback.read(run_dir) == begun.rollbacks
    return begun.rollbacks


def test_no_run_returns_to_before_steps_of_another_batch_size(tmp_path):
    """Steps 21 to 40 trained 8 samples each, all others 4."""
    save(tmp_path, 10, 20, 50)
    rewrite_manifest(tmp_path / "global_step_50", lambda tree: tree.update(samples_consumed=280))
    schedule = Schedule((Share(1000),), 4, seed=0, start=Position(60, 0, 320))
    batches = TrainLoader(ToySamples(), plan=None, schedule=schedule, total_steps=90, num_workers=0)
    found = rollback.candidates(
        tmp_path, onset=80, history=History(), fingerprints={}, leads_here=batches.follows
    )
    assert [info.step for info in found] == [50]


def test_another_directory_takes_over_the_rollbacks_before_its_checkpoint(tmp_path):
    decide = partial(rollback.decide, tmp_path, found_step=80, last_step=90, reason="a spike")
    save(tmp_path, 10, 40)
    early = decide(layout.inspect(tmp_path / "global_step_10"), onset=30)
    save(tmp_path, 40, 60)
    decide(layout.inspect(tmp_path / "global_step_60"), onset=80)
    elsewhere = partial(run_ranks, rollbacks_at_start, 1, tmp_path / "other")
    start = partial(
        elsewhere, resume_mode="resume_path", resume_from_path=f"{tmp_path}/global_step_40"
    )
    assert start({}) == [early]
    assert elsewhere({}) == [Rollbacks()], "a new run after a start that saved nothing"
    with pytest.raises(AssertionError, match="skips the batches of steps 41 to 88, but"):
        start({"train_batch_size": "4"})
