"""A run that is stopped or killed at a chosen place and restarted leaves the same result as an
undisturbed run.
"""

import importlib
import os
import shutil
import signal
from functools import partial

import pytest
from small_files import read_lines
from whole_equality import compare_runs
from whole_runs import curve, stop_in_step, tiny_model, train

from trainer.checkpoint import layout
from trainer.quickstart import TRAIN_FILE

STEPS = 8
RECIPE = (
    "trainer.total_training_steps=8",
    "trainer.test_freq=4",
    "trainer.save_freq=3",
    "trainer.max_ckpt_to_keep=2",
)
EARLY = (
    "trainer.early_stop_patience=1",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=1",
)


@pytest.fixture(scope="module")
def base(root):
    return (*tiny_model(root), *RECIPE)


@pytest.fixture(scope="module")
def straight(base, root):
    run_dir = root / "straight"
    train(run_dir, 1, *base)
    return run_dir


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(base, run_dir):
    return partial(train, run_dir, 1, *base)


# The following functions change the process of the run before it begins.


def learn_nothing(*, stop_in=None):
    """No validation is better than the first. A signal arrives during validation `stop_in`."""
    from trainer.train.detection.validations import ValidationWatch

    observe = ValidationWatch.observe

    def rising(self, step, *, val_loss, **settings):
        return observe(self, step, val_loss=val_loss + step, **settings)

    ValidationWatch.observe = rising
    if stop_in is not None:
        stop_in_validation(stop_in)


def stop_in_validation(count):
    """The signal arrives during the `count`-th validation."""
    from trainer.train.validation import Validation

    begin = Validation.__init__
    seen = []

    def __init__(self, *arguments, **settings):  # noqa: N807
        seen.append(self)
        begin(self, *arguments, **settings)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGTERM)

    Validation.__init__ = __init__


def kill_before(run_dir, module, name):
    """After the last step it is killed instead of this call."""
    holder = importlib.import_module(module)
    whole = getattr(holder, name)

    def call(*arguments, **settings):
        if (run_dir / f"global_step_{STEPS}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **settings)

    setattr(holder, name, call)


SCENARIOS = {
    "in a step with a validation": [partial(stop_in_step, 4)],
    "in the last validation": [partial(stop_in_validation, 2)],
    "in a validation and in the owed one": [partial(stop_in_validation, 1)] * 2,
    "in the last step and in the owed validation": [
        partial(stop_in_step, 8),
        partial(stop_in_validation, 1),
    ],
}


def steps_of_validations(run_dir):
    """Return the steps as written, including those of earlier attempts."""
    rows = read_lines(run_dir / "metrics.jsonl")
    return sorted(row["step"] for row in rows if row["kind"] == "val")


def state_of(run_dir):
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in run_dir.rglob("*")}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_validation_is_lost_by_a_stop(start, straight, run_dir, scenario):
    for stop in SCENARIOS[scenario]:
        start(code=75, before=stop)
    start()
    assert compare_runs(straight, run_dir, steps=STEPS).differences == []
    assert steps_of_validations(run_dir) == [4, 8], "a validation that was not due"


@pytest.fixture(scope="module")
def owing(base, root):
    """A run of two ranks that owes the validation of step 4, with which it ends early."""
    run_dir = root / "owing"
    train(run_dir, 2, *base, *EARLY, code=75, before=partial(learn_nothing, stop_in=2))
    assert layout.read_pointer(run_dir).step == 4, "saved at once"
    return run_dir


@pytest.mark.covers("S2.36:C S3.41:C")
def test_a_stop_with_early_stopping_owed_ends_early_and_then_the_run_is_complete(
    base, owing, run_dir
):
    """The early stop that an owed validation finds ends the run on both ranks, and every later
    start. The best checkpoint is kept along with the newest.
    """
    shutil.copytree(owing, run_dir)
    start = partial(train, run_dir, 2, *base, *EARLY)
    start(before=learn_nothing)
    before = state_of(run_dir)
    output = start(before=learn_nothing)
    assert "ended the run early, at step 4; nothing to do" in output
    assert state_of(run_dir) == before
    assert steps_of_validations(run_dir) == [2, 4]
    assert [info.step for info in layout.committed(run_dir)] == [2, 4]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "set trainer.save_freq to the value of trainer.test_freq"),
        (
            ("trainer.checkpoint.mirror=file:///nowhere",),
            "copy global_step_2 from the mirror file:///nowhere",
        ),
    ],
)
def test_the_end_says_that_the_best_steps_checkpoint_is_gone(base, owing, run_dir, words, fix):
    shutil.copytree(owing, run_dir)
    shutil.rmtree(run_dir / "global_step_2")
    output = train(run_dir, 2, *base, *EARLY, *words, before=learn_nothing)
    assert "at step 2" in output and f"model       {run_dir}/global_step_4/huggingface" in output
    assert f"{run_dir} has no global_step_2, so the model below is from step 4. Fix: " in output
    assert fix in output


def test_a_larger_patience_continues_a_run_that_ended_early(start, run_dir):
    start(*EARLY, before=learn_nothing)
    start(*EARLY, "trainer.early_stop_patience=2", before=learn_nothing)
    assert steps_of_validations(run_dir) == [2, 4, 6], "the earlier validations count"


ENDS = {
    "before the pointer moves": ("trainer.checkpoint.layout", "publish"),
    "before the report": ("trainer.train.start.end", "write_final_report"),
    "before the end is recorded": ("trainer.checkpoint.finished", "write"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_killed_at_its_end_is_tidied(start, straight, run_dir, end):
    start(code=1, before=partial(kill_before, run_dir, *ENDS[end]))
    assert "is the last step's checkpoint, but the run did not end" in start()
    assert compare_runs(straight, run_dir, steps=STEPS).differences == []
    before = state_of(run_dir)
    assert "already complete" in start() and state_of(run_dir) == before


def test_other_validation_rows_are_refused_and_if_allowed_counted_alone(start, run_dir, tmp_path):
    rows = tmp_path / "rows.jsonl"
    first, second, *_ = TRAIN_FILE.read_text().splitlines(keepends=True)
    rows.write_text(first)
    word = f"data.val_files={rows}"
    start(word, code=75, before=partial(stop_in_step, 5))
    rows.write_text(first + second)
    assert "  <- refused: the best loss" in start(word, code=2)
    start(word, "trainer.resume_allow=[validation]", before=learn_nothing)
    assert curve(run_dir, "val/best_step") == {4: 4, 8: 8}


def test_a_lost_log_is_said_at_resume(start, run_dir):
    start(code=75, before=partial(stop_in_step, 5))
    (run_dir / "metrics.jsonl").unlink()
    output = start(code=75, before=partial(stop_in_step, 6))
    assert "ends at step 0, but the checkpoint is from step 5" in output
