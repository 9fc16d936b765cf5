"""The command `checkpoint prune` deletes old checkpoints and never changes what a resume loads."""

import os
import random

import pytest
from checkpoint_fakes import content_of, expected_files, is_whole, save, write_unfinished
from cli_states import LEFT, leave_behind, names
from cli_states import call as call  # fixtures
from cli_states import run_dir as run_dir
from small_files import flip
from sweeps import short_or_full

from trainer.checkpoint import choice, fsio, layout
from trainer.checkpoint.layout import POINTER
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST


@pytest.mark.parametrize("options", [[], ["--corrupt"]])
def test_prune_keeps_the_newest_and_the_pointers(run_dir, call, options):
    save(run_dir, 10)
    leave_behind(run_dir)
    write_unfinished(run_dir, 5)
    (run_dir / POINTER).write_text("4")
    code, out, err = call("prune", run_dir, "--keep", 1, "--yes", *options)
    assert (code, err) == (0, "")
    assert "keeps global_step_4, global_step_5 (incomplete), global_step_10\n" in out
    kept = {f"global_step_{step}" for step in (4, 5, 10)}
    assert names(run_dir) == kept | set(sorted(LEFT)[: not options])
    assert is_whole(run_dir / "global_step_4") and is_whole(run_dir / "global_step_10")


@pytest.mark.parametrize("damaged", [6, 4], ids=["the newest", "the one a resume takes"])
def test_prune_is_refused_when_what_it_relies_on_is_damaged(run_dir, call, damaged):
    (run_dir / POINTER).write_text("4")
    leave_behind(run_dir)
    flip(run_dir / f"global_step_{damaged}" / layout.model_file(2, 0))
    before = names(run_dir)
    code, _, err = call("prune", run_dir, "--keep", 1, "--yes", "--corrupt")
    assert code == 1 and names(run_dir) == before
    assert f"global_step_{damaged}' is damaged: {layout.model_file(2, 0)}" in err


@pytest.mark.parametrize("options", [[], ["--yes"]])
def test_prune_is_refused_while_a_run_trains(run_dir, call, options):
    with RunLock(run_dir):
        code, out, err = call("prune", run_dir, "--keep", 1, *options)
    assert (code, out, len(names(run_dir))) == (2, "", 3) and f"pid {os.getpid()} on " in err
    assert call("prune", run_dir, "--keep", 1, *options)[0] == 0


def random_state(run_dir, chance):
    """Saves, some of them damaged, possibly a pointer that was moved, and leftovers."""
    run_dir.mkdir()
    steps = sorted(chance.sample(range(10, 100), chance.randint(1, 5)))
    save(run_dir, *steps)
    for step in steps:
        if chance.random() < 0.25:
            flip(run_dir / f"global_step_{step}" / chance.choice([*content_of(0), MANIFEST]))
    (run_dir / POINTER).write_text(str(chance.choice([*steps, *steps[-1:] * 5, "garbage"])))
    leave_behind(run_dir)


def resumes(path):
    """Return True if everything except the export is complete. Independent of the code under test."""
    return all(
        (path / name).read_bytes() == data
        for name, data in expected_files(path.name).items()
        if not name.startswith("huggingface/")
    )


def resumed_step(run_dir):
    """Return the step that a start would load: the first complete candidate."""
    try:
        return next(
            (info.step for info in choice.select(run_dir).candidates if resumes(info.path)), None
        )
    except choice.NoUsableCheckpointError:
        return None


def test_prune_never_changes_what_a_resume_loads(tmp_path, call, monkeypatch):
    """Test any state, with a kill (an error that nothing catches) before any operation."""
    outcomes = set[int | str]()
    for seed in short_or_full(range(40), full=range(60)):
        chance = random.Random(seed)
        run_dir = tmp_path / str(seed)
        random_state(run_dir, chance)
        before = resumed_step(run_dir)
        operations = list(range(chance.choice([10**4, chance.randrange(30)])))
        monkeypatch.setattr(fsio, "observer", lambda _, left=operations: left.pop())
        keep = chance.randint(1, 2)
        try:
            outcomes.add(call("prune", run_dir, "--keep", keep, "--yes", "--corrupt")[0])
        except IndexError:
            outcomes.add("killed")
        monkeypatch.setattr(fsio, "observer", None)
        assert resumed_step(run_dir) == before, f"seed {seed}"
    assert outcomes == {0, 1, 2, "killed"}
