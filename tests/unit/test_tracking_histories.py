"""The CSV histories: one row per epoch, equal with and without kills and rollbacks."""

import csv
import random

import pytest

from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.tracking import Tracking
from trainer.tracking import histories as tracking_histories

STEPS = 12
STEPS_PER_EPOCH = 4
KILLED_AT = 9
SEED = 20


def track(run_dir):
    return Tracking("project", "experiment", [], {}, run_dir=run_dir, total_steps=STEPS)


def log_step(tracking, step, *, spoiled=0.0):
    noise = random.Random(SEED + step)
    row = {
        "train/loss": noise.random() + spoiled,
        "train/lr(1e-3)": step / 100,
        "train/grad_norm": noise.random(),
        "train/time(s)": 0.5,
        "train/total_token_count": 20 * step,
        "train/total_valid_token_count": 10 * step,
        "progress/epoch": (step - 1) // STEPS_PER_EPOCH,
    }
    tracking.log(row, step)
    if step % 2 == 0:
        validation = {"val/loss": noise.random() + spoiled, "val/samples": 3}
        tracking.log(validation | {"time/eval/total_s": 0.25}, step)


def histories(run_dir):
    return [(run_dir / f"{name}_history.csv").read_text() for name in ("training", "validation")]


def rows(run_dir, name):
    with (run_dir / f"{name}_history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def summaries(monkeypatch):
    """Return the summaries that are logged at the end of epochs."""
    found = []
    monkeypatch.setattr(tracking_histories.logger, "info", lambda text, *a: found.append(text % a))
    return found


@pytest.fixture
def whole(tmp_path):
    """The files of a run in one piece."""
    tracking = track(tmp_path / "whole")
    for step in range(1, STEPS + 1):
        log_step(tracking, step)
    tracking.finish(EXIT_DONE)
    return histories(tmp_path / "whole")


@pytest.mark.covers("S1.1 S1.2 S1.3 S1.4 S1.10")
def test_one_row_per_epoch_from_one_without_any_setting(tmp_path, summaries, whole):
    header = "epoch,loss,steps,last_step,tokens,lr,grad_norm,seconds,nonfinite_steps"
    assert whole[0].splitlines()[0] == header
    training = rows(tmp_path / "whole", "training")
    columns = ("epoch", "steps", "last_step", "tokens")
    shown = [" ".join(row[name] for name in columns) for row in training]
    assert shown == ["1 4 4 200", "2 4 8 520", "3 4 12 840"]
    losses = {step: random.Random(SEED + step).random() for step in range(1, 5)}
    expected = sum(10 * step * loss for step, loss in losses.items()) / 100
    assert float(training[0]["loss"]) == pytest.approx(expected, rel=1e-12), "mean over tokens"
    assert [line.split(" | ")[0] for line in summaries] == ["epoch 1", "epoch 2", "epoch 3"]
    assert whole[1].splitlines()[0] == "epoch,loss,step,samples,seconds"
    validation = rows(tmp_path / "whole", "validation")
    assert [f"{row['epoch']} {row['step']}" for row in validation] == ["1 4", "2 8", "3 12"]


@pytest.mark.covers("S1.10 S3.29")
def test_restarts_rollbacks_and_a_kill_leave_no_trace(tmp_path, whole):
    for first, last, target in [(1, 3, 0), (3, 6, 2), (5, 9, 4), (9, 12, 6), (2, 12, 11)]:
        tracking = track(tmp_path / "pieces")
        for step in range(first, last + 1):
            log_step(tracking, step, spoiled=5.0 if step > target else 0.0)
        tracking.rewind(target)
        for step in range(target + 1, last + 1):
            log_step(tracking, step)
        if last == KILLED_AT:
            continue
        tracking.finish(EXIT_DONE if last == STEPS else EXIT_RESUMABLE)
        steps = [int(row["last_step"]) for row in rows(tmp_path / "pieces", "training")]
        assert steps[-1] == last, "an epoch under way shows what there is of it"
    assert histories(tmp_path / "pieces") == whole


@pytest.mark.covers("S1.4 S1.7")
def test_own_metrics_have_columns_and_nonfinite_losses_are_counted(tmp_path):
    tracking = track(tmp_path)
    for step, loss in enumerate([1.0, float("nan"), 3.0], start=1):
        tracking.log({"train/loss": loss, "Train/Reward_Mean": loss, "latency": 30.0}, step)
    tracking.log({"val/loss": 0.5, "val/accuracy_mean": 0.75}, 2)
    tracking.finish(0)
    (row,) = rows(tmp_path, "training")
    expected = {"loss": "2.0", "reward_mean": "2.0", "latency": "30.0", "nonfinite_steps": "1"}
    assert expected.items() <= row.items()
    (row,) = rows(tmp_path, "validation")
    assert row == {"epoch": "1", "loss": "0.5", "accuracy_mean": "0.75", "step": "2"}
