"""How a run starts and stops: a shared directory, disk space, a stop during validation, a time
limit.
"""

import pytest
from family_trials import heard
from ranks import run_ranks
from toy_runs import Recipe, begin, fingerprints, run, trainer_config
from toy_runs import source as source  # a fixture

from trainer.checkpoint import choice, fsio, layout, start
from trainer.config import ConfigError
from trainer.errors import EXIT_RESUMABLE, CannotWriteError
from trainer.runtime.signals import StopRequest


def start_unseen(world, run_dir):
    """Rank 1 stands for another machine: it does not see what rank 0 writes."""
    start.SHARED_WITHIN_S = 0.3
    if world.rank == 1:
        run_dir = run_dir.parent / "a directory of this machine"
        run_dir.mkdir()
    try:
        config = trainer_config(run_dir, Recipe())
        begin(config, {}, world, total_steps=6)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.covers("S3.30")
def test_a_directory_that_is_not_shared_is_refused_on_every_rank(tmp_path):
    for error in run_ranks(start_unseen, 3, tmp_path / "run"):
        assert "ranks [1] do not see the files that rank 0 writes" in error
    assert not list((tmp_path / "run").glob(".staging*"))


def start_on_full_disk(world, run_dir, source):
    fsio.free_bytes = lambda path: 1000
    try:
        run(world, run_dir, source, Recipe())
    except CannotWriteError as error:
        return str(error)
    return ""


@pytest.mark.covers("S3.25:C")
def test_a_full_disk_is_refused_with_numbers_before_the_first_step(tmp_path, source):
    for error in run_ranks(start_on_full_disk, 2, tmp_path / "run", source):
        assert "a checkpoint needs 1." in error and "0.977 KiB is free" in error
    assert layout.checkpoints(tmp_path / "run") == []


@pytest.fixture(scope="module")
def ended(source, root):
    run_dir = root / "run"
    run_ranks(run, 1, run_dir, source, Recipe())
    return run_dir


STEPS = (0, 99)
"""Test a run that is finished with its last checkpoint, and one that is not."""


def errors_for_other_data(world, run_dir):
    own = fingerprints(Recipe()) | {"data": "other"}
    errors = []
    for total_steps in STEPS:
        with pytest.raises(ConfigError) as raised:
            begin(trainer_config(run_dir, Recipe()), own, world, total_steps=total_steps)
        errors.append(str(raised.value))
    return errors


def test_a_run_does_not_answer_for_other_data(ended):
    for error in run_ranks(errors_for_other_data, 1, ended)[0]:
        assert "data: " in error and "-> other   <- refused" in error


def said_at_starts(world, run_dir):
    said = []
    for total_steps in STEPS:
        config = trainer_config(run_dir, Recipe())
        with heard() as lines:
            begun = begin(config, fingerprints(Recipe()), world, total_steps=total_steps)
        begun.lock.release()
        said.append(lines)
    return said


def test_why_this_checkpoint_is_said_once(ended):
    """The choice is made identically before and under the lock; the log shows it only once."""
    (ended / "latest_checkpointed_iteration.txt").write_text("4")
    for said in run_ranks(said_at_starts, 1, ended)[0]:
        assert said and len(said) == len(set(said)), said


def run_for_no_time(world, run_dir, source):
    stop = StopRequest(max_time_s=0.0 if world.rank == 1 else 1000.0)
    return run(world, run_dir, source, Recipe(), stop=stop)


def test_a_time_limit_of_one_rank_stops_all_at_the_same_step(tmp_path, source):
    for result in run_ranks(run_for_no_time, 2, tmp_path / "run", source):
        assert (result.exit_code, set(result.losses)) == (EXIT_RESUMABLE, {1})
    assert choice.select(tmp_path / "run").chosen.step == 1
