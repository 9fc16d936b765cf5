"""The CSV histories: one row per epoch, the same after kills and rollbacks as without."""

import csv
import logging
import random
from pathlib import Path

import pytest

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.tracking import Tracking

STEPS, STEPS_PER_EPOCH = 12, 4
SEED = 20


def track(run_dir: Path) -> Tracking:
    return Tracking("project", "experiment", [], {}, run_dir=run_dir, total_steps=STEPS)


def log_step(tracking: Tracking, step: int, *, spoiled: float = 0.0) -> None:
    noise = random.Random(SEED + step)
    tracking.log(
        {
            "train/loss": noise.random() + spoiled,
            "train/lr(1e-3)": step / 100,
            "train/grad_norm": noise.random(),
            "train/time(s)": 0.5,
            "train/total_token_count": 20 * step,
            "train/total_valid_token_count": 10 * step,
            "train/reward_mean": noise.random(),
            "progress/epoch": (step - 1) // STEPS_PER_EPOCH,
        },
        step,
    )
    if step % 2 == 0:
        tracking.log(
            {"val/loss": noise.random() + spoiled, "val/samples": 3, "time/eval/total_s": 0.25},
            step,
        )


def histories(run_dir: Path) -> tuple[str, str]:
    training, validation = (run_dir / f"{name}_history.csv" for name in ("training", "validation"))
    return training.read_text(), validation.read_text()


def rows(run_dir: Path, name: str) -> list[dict[str, str]]:
    with (run_dir / f"{name}_history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def whole(tmp_path: Path) -> tuple[str, str]:
    """The files of a run in one piece."""
    tracking = track(tmp_path / "whole")
    for step in range(1, STEPS + 1):
        log_step(tracking, step)
    tracking.finish(EXIT_DONE)
    return histories(tmp_path / "whole")


@pytest.mark.covers("S1.1", "S1.2", "S1.3", "S1.4")
def test_one_row_per_epoch_from_one_without_any_setting(
    tmp_path: Path, whole: tuple[str, str]
) -> None:
    training, validation = (
        rows(tmp_path / "whole", "training"),
        rows(tmp_path / "whole", "validation"),
    )
    first = whole[0].splitlines()[0]
    assert (
        first
        == "epoch,loss,reward_mean,reward_std,steps,last_step,tokens,lr,grad_norm,seconds,nonfinite_steps"
    )
    assert [(row["epoch"], row["steps"], row["last_step"], row["tokens"]) for row in training] == [
        ("1", "4", "4", "200"), ("2", "4", "8", "520"), ("3", "4", "12", "840"),
    ]  # fmt: skip
    losses = {step: random.Random(SEED + step).random() for step in range(1, 5)}
    expected = sum(10 * step * loss for step, loss in losses.items()) / 100
    assert float(training[0]["loss"]) == pytest.approx(expected, rel=1e-12), (
        "not the mean over tokens"
    )
    assert float(training[1]["lr"]) == pytest.approx(8e-5) and float(training[2]["seconds"]) == 2.0
    assert [(row["epoch"], row["step"], row["samples"], row["seconds"]) for row in validation] == [
        ("1", "4", "3", "0.25"), ("2", "8", "3", "0.25"), ("3", "12", "3", "0.25"),
    ]  # fmt: skip


@pytest.mark.covers("S3.29")
@pytest.mark.parametrize(
    "pieces", [[(1, 3), (3, 6), (5, 9), (9, 12)], [(1, 12), (2, 12)], [(1, 7), (1, 12)]]
)
def test_restarts_leave_no_trace(
    tmp_path: Path, whole: tuple[str, str], pieces: list[tuple[int, int]]
) -> None:
    for first, last in pieces:
        tracking = track(tmp_path / "pieces")
        for step in range(first, last + 1):
            log_step(tracking, step)
        tracking.finish(EXIT_DONE if last == STEPS else EXIT_RESUMABLE)
    assert histories(tmp_path / "pieces") == whole


@pytest.mark.parametrize("target", [0, 2, 4, 6])
def test_a_rollback_leaves_no_trace(tmp_path: Path, whole: tuple[str, str], target: int) -> None:
    tracking = track(tmp_path / "rolled")
    for step in range(1, 8):
        log_step(tracking, step, spoiled=5.0 if step > target else 0.0)
    tracking.rewind(target)
    for step in range(target + 1, STEPS + 1):
        log_step(tracking, step)
    tracking.finish(EXIT_DONE)
    assert histories(tmp_path / "rolled") == whole


def test_an_attempt_that_ends_inside_an_epoch_shows_what_there_is_of_it(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    for step in range(1, 7):
        log_step(tracking, step)
    tracking.finish(75)
    assert [(row["epoch"], row["steps"]) for row in rows(tmp_path, "training")] == [
        ("1", "4"),
        ("2", "2"),
    ]


@pytest.mark.covers("S1.4", "S1.7")
def test_metrics_of_a_facade_user_have_the_columns_of_the_guide(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    for step, (reward, accuracy) in enumerate([(-1.0, 0.0), (0.0, 0.5)], start=1):
        row = {
            "Train/Loss": -0.5,
            "reward": reward,
            "Train/Accuracy_Mean": accuracy,
            "accuracy_std": 0.25,
        }
        tracking.log({**row, "latency": 30.0, "train/budget_violation_rate": 0.5}, step)
    tracking.log({"val/loss": 0.5, "val/accuracy_mean": 0.75, "val/accuracy_std": 0.125}, 2)
    tracking.finish(0)
    (row,) = rows(tmp_path, "training")
    assert list(row)[:9] == [
        "epoch", "loss", "reward_mean", "reward_std", "accuracy_mean", "accuracy_std", "latency_mean", "latency_std",
        "budget_violation_rate",
    ]  # fmt: skip
    assert list(map(float, list(row.values())[:9])) == [
        1,
        -0.5,
        -0.5,
        0.5,
        0.25,
        0.25,
        30.0,
        0.0,
        0.5,
    ]
    assert rows(tmp_path, "validation") == [
        {"epoch": "1", "loss": "0.5", "accuracy_mean": "0.75", "accuracy_std": "0.125", "step": "2"}
    ]


def test_a_loss_that_is_not_finite_is_left_out_and_counted(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    for step, loss in enumerate([1.0, float("nan"), 3.0], start=1):
        tracking.log({"train/loss": loss}, step)
    tracking.finish(0)
    (row,) = rows(tmp_path, "training")
    assert (row["loss"], row["steps"], row["nonfinite_steps"]) == ("2.0", "3", "1")


@pytest.mark.covers("S1.10")
def test_the_end_of_an_epoch_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer.tracking.histories")
    for steps, exit_code in ((range(1, 7), 75), (range(5, 13), 0)):
        tracking = track(tmp_path)
        for step in steps:
            log_step(tracking, step)
        tracking.finish(exit_code)
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "trainer.tracking.histories"
    ]
    assert [line.split(":")[0] for line in said] == ["epoch 1", "epoch 2", "epoch 3"]
    assert " | val/loss " in said[0] and "steps 4 | tokens 200 | seconds 2" in said[0]
