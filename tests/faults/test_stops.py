"""A run that is stopped or killed at a chosen place, and started again, leaves what an
undisturbed one leaves.
"""

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_equality import compare_runs
from whole_runs import run, stop_in_step, tiny_model

from trainer.tracking import read_metrics

STEPS = 8
RECIPE = (
    "trainer.total_training_steps=8",
    "trainer.test_freq=4",
    "trainer.save_freq=3",
    "trainer.max_ckpt_to_keep=2",
)
Start = Callable[..., tuple[int | None, str]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (*tiny_model(tmp_path_factory.mktemp("stops")), *RECIPE)


@pytest.fixture(scope="module")
def straight(base: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "straight"
    code, output = run(
        1, *base, f"trainer.default_local_dir={run_dir}", log=run_dir.with_suffix(".log")
    )
    assert code == 0, output
    return run_dir


@pytest.fixture
def start(base: tuple[str, ...], tmp_path: Path) -> Start:
    def start(before: Callable[[], None] | None = None, *changes: str) -> tuple[int | None, str]:
        words = (*base, f"trainer.default_local_dir={tmp_path}/run", *changes)
        return run(1, *words, log=tmp_path / "log", before=before)

    return start


def expire_in_step(step: int) -> None:
    """In this process: `trainer.max_time` is over within the step."""
    from trainer.train import fit

    whole = fit.training_step

    def training_step(run: Any, batch: Any) -> Any:
        if batch.step == step:
            run.stop._ends_at = 0.0
        return whole(run, batch)

    fit.training_step = training_step


def learn_nothing() -> None:
    """In this process: no validation is better than the first."""
    from trainer.train import guard

    guard.EARLY_STOP_MIN_DELTA = 100.0


def learn_nothing_and_stop_in_step(step: int) -> None:
    learn_nothing()
    stop_in_step(step)


def stop_in_validation(count: int) -> None:
    """In this process: the signal comes within its `count`-th validation."""
    from trainer.train.validation import Validation

    begin, seen = Validation.__init__, []

    def __init__(self: Validation, *arguments: Any, **settings: Any) -> None:  # noqa: N807
        seen.append(self)
        begin(self, *arguments, **settings)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGTERM)

    Validation.__init__ = __init__  # type: ignore[method-assign]


SCENARIOS: dict[str, list[Callable[[], None]]] = {
    "in a step with a validation": [functools.partial(stop_in_step, 4)],
    "by max_time in a step with a validation": [functools.partial(expire_in_step, 4)],
    "in the last step": [functools.partial(stop_in_step, 8)],
    "in a validation": [functools.partial(stop_in_validation, 1)],
    "in the last validation": [functools.partial(stop_in_validation, 2)],
    "in a validation and in the owed one": [functools.partial(stop_in_validation, 1)] * 2,
    "in the last step and in the owed validation": [
        functools.partial(stop_in_step, 8),
        functools.partial(stop_in_validation, 1),
    ],
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_validation_is_lost_by_a_stop(start, straight, tmp_path, scenario):
    for stop in SCENARIOS[scenario]:
        code, output = start(stop)
        assert code == 75, output
    code, output = start()
    assert code == 0, output
    found = compare_runs(straight, tmp_path / "run", steps=STEPS)
    assert found.differences == []
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(row["step"] for row in rows if row["kind"] == "val") == [4, 8], (
        "a validation that was not due"
    )


def test_a_stop_with_early_stopping_owed_ends_early(start, tmp_path):
    """The early stop that an owed validation finds ends the run, and the next start as well."""
    early = ("trainer.early_stop_patience=1", "trainer.test_freq=2")
    assert start(functools.partial(learn_nothing_and_stop_in_step, 4), *early)[0] == 75
    for _ in range(2):
        code, output = start(learn_nothing, *early)
        assert code == 0, output
    assert [
        row["step"]
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if row["kind"] == "val"
    ] == [2, 4]
    assert not (tmp_path / "run" / "global_step_6").exists()


def test_an_early_stopped_run_is_complete(start, tmp_path):
    early = ("trainer.early_stop_patience=1", "trainer.test_freq=2")
    assert start(learn_nothing, *early)[0] == 0
    before = _snapshot(tmp_path / "run")
    code, output = start(learn_nothing, *early)
    assert code == 0 and "ended the run early, at step 4; nothing to do" in output
    assert _snapshot(tmp_path / "run") == before


def test_a_complete_run_with_a_gap_in_its_metrics_says_so(start, tmp_path):
    assert start()[0] == 0
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(line for line in lines if not line.startswith(('{"step":2,', '{"step":3,')))
    )
    code, output = start()
    assert code == 0 and "nothing to do" in output
    assert "metrics.jsonl lacks the rows of steps 2-3, which are lost" in output


def _snapshot(run_dir: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in run_dir.rglob("*")}


# killed at its end --------------------------------------------------------------------------------
# --------------------


def kill_before(run_dir: Path, place: str, name: str) -> None:
    """In this process: it is killed instead of this call, after the last step."""
    import importlib

    module, _, owner = place.partition(":")
    holder: Any = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    whole = getattr(holder, name)

    def call(*arguments: Any, **settings: Any) -> Any:
        if (run_dir / "global_step_8").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **settings)

    setattr(holder, name, call)


ENDS = {
    "before the pointer moves": ("trainer.checkpoint.layout", "publish"),
    "before rotation": ("trainer.checkpoint.retention", "rotate"),
    "before the trackers close": ("trainer.tracking:Tracking", "finish"),
    "before the report": ("trainer.train.start.end", "write_final_report"),
    "before the end is recorded": ("trainer.checkpoint.finished", "write"),
    "before the lock is given back": ("trainer.checkpoint.lock:RunLock", "release"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_killed_at_its_end_is_tidied(start, straight, tmp_path, end):
    code, _ = start(functools.partial(kill_before, tmp_path / "run", *ENDS[end]))
    assert code == 1, "killed"
    code, output = start()
    assert code == 0 and "was the last step, but the run did not end" in output
    assert compare_runs(straight, tmp_path / "run", steps=STEPS).differences == []
    before = _snapshot(tmp_path / "run")
    code, output = start()
    assert code == 0 and "already complete" in output and _snapshot(tmp_path / "run") == before


def test_a_start_that_fails_leaves_an_untidy_end_to_the_next(start, straight, tmp_path):
    """It gives back the lock, by which the next start would have known that the run was killed."""
    kill = functools.partial(kill_before, tmp_path / "run", *ENDS["before the report"])
    assert start(kill)[0] == 1
    assert start(_fail_to_begin)[0] == 1
    code, output = start()
    assert (
        code == 0
        and "was the last step, but the run did not end: finished.json is not written" in output
    )
    assert compare_runs(straight, tmp_path / "run", steps=STEPS).differences == []


def _fail_to_begin() -> None:
    from trainer.checkpoint import start

    def fail(*_: Any) -> None:
        raise RuntimeError("a rank was lost")

    start._require_shared = fail


# what is said, and what is logged last
# --------------------------------------------------------------------------------


def test_the_last_save_and_the_last_validation_are_timed(straight):
    rows = {
        row["kind"]: row for row in read_metrics(straight / "metrics.jsonl") if row["step"] == STEPS
    }
    assert rows["end"].keys() >= {
        "time/train/checkpoint_s",
        "time/train/eval_s",
        "ckpt/save_s",
        "ckpt/bytes",
    }
    assert "train/loss" in rows["train"] and rows["end"]["ckpt/age_steps"] == 0


@pytest.mark.parametrize("loss", ["emptied", "gone"])
def test_a_lost_log_is_said_at_resume(start, tmp_path, loss):
    assert start(functools.partial(stop_in_step, 5))[0] == 75
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("") if loss == "emptied" else metrics.unlink()
    code, output = start(functools.partial(stop_in_step, 6))
    assert code == 75 and "metrics.jsonl ends at step 0, the checkpoint is of step 5" in output


def test_a_full_disk_has_room_again_with_fewer_checkpoints(start, tmp_path):
    """What the message advises works: old checkpoints go before room is asked for, and never
    the newest.
    """
    stop, full = (
        functools.partial(stop_in_step, 7),
        functools.partial(full_beyond, tmp_path / "run", 5),
    )
    assert start(stop, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=5")[0] == 75
    code, output = start(full, "trainer.max_ckpt_to_keep=5")
    assert code == 73 and "lower trainer.max_ckpt_to_keep" in output
    code, output = start(full, "trainer.max_ckpt_to_keep=1")
    assert code == 0, output
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_8"]


def full_beyond(run_dir: Path, count: int) -> None:
    """In this process: the disk has room for so many checkpoints."""
    from trainer.checkpoint import fsio

    def free_bytes(path: Path) -> int:
        return 10 * 2**20 if len(list(run_dir.glob("global_step_*"))) < count else 1000

    fsio.free_bytes = free_bytes
