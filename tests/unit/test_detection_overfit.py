"""Overfitting, early stopping and rising epochs, from curves of validation and training losses."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from curves import val_curve

from trainer.detection.watches import OverfitJudge

NUM_RUNS = 300


def judged(
    val_losses: Sequence[float], train_losses: Sequence[float]
) -> tuple[list[int], OverfitJudge]:
    """Which validations are told to overfit, and the judge after them."""
    judge = OverfitJudge()
    losses = enumerate(zip(val_losses, train_losses, strict=True))
    return [
        step for step, (val, train) in losses if judge.observe(step, val_loss=val, train_loss=train)
    ], judge


@pytest.mark.covers("S3.43", "S3.32")
def test_the_example_of_the_requirements() -> None:
    found, judge = judged([1.5, 1.3, 1.4, 1.6], [1.2, 0.8, 0.5, 0.3])
    assert (found, judge.best_step) == ([3], 1)


def test_a_far_rise_is_overfitting_at_once() -> None:
    assert judged([1.5, 1.0, 1.11], [1.2, 0.8, 0.5])[0] == [2]


def test_a_training_loss_that_did_not_fall_is_no_overfitting() -> None:
    found, _ = judged([1.5, 1.0, 1.3, 1.6], [1.2, 0.8, 0.8, 0.795])
    assert found == []


def test_two_rises_must_stand_in_a_row() -> None:
    assert judged([1.0, 1.05, 1.01, 1.05], [1.0, 0.9, 0.8, 0.7])[0] == []
    assert judged([1.0, 1.05, 1.05], [1.0, 0.9, 0.8])[0] == [2]


def test_a_noisy_curve_needs_a_larger_rise() -> None:
    """The same 5% over the best one, twice: overfitting on a smooth curve, nothing on one that
    jumps by 2%.
    """
    train = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    assert judged([1.2, 1.15, 1.1, 1.05, 1.0, 1.05, 1.05], train)[0] == [6]
    assert judged([1.2, 1.12, 1.14, 1.03, 1.0, 1.05, 1.05], train)[0] == []


def test_no_validation_has_no_best_step() -> None:
    judge = OverfitJudge()
    assert (judge.best_loss, judge.best_step) == (None, None)


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01])
def test_healthy_validation_curves_are_hardly_ever_called_overfit(noise: float) -> None:
    rng = np.random.default_rng(1)
    found = [judged(*val_curve(rng, noise=noise, turn=1.0))[0] for _ in range(NUM_RUNS)]
    assert sum(bool(steps) for steps in found) <= 0.01 * NUM_RUNS, "seed 1; 0.3% over many runs"


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01])
def test_overfitting_is_found_and_the_best_checkpoint_with_it(noise: float) -> None:
    rng = np.random.default_rng(2)
    num_late = num_missed = num_far = 0
    for _ in range(NUM_RUNS):
        val, train = val_curve(rng, noise=noise, turn=0.5)
        steps, found = judged(val, train)
        num_missed += not steps
        risen = int(np.argmax((np.arange(20) > 10) & (val > 1.06 * val.min())))
        num_late += bool(steps) and steps[0] > risen + 3
        num_far += found.best_step != int(np.argmin(val))
    assert (num_missed, num_far) == (0, 0), "seed 2"
    assert num_late <= 0.02 * NUM_RUNS, "seed 2"


@pytest.mark.covers("S2.36")
def test_early_stopping_waits_for_its_patience() -> None:
    watched = OverfitJudge(patience=3, min_delta=0.002)
    stopped = []
    for step, val_loss in enumerate([1.5, 1.2, 1.199, 1.21, 1.1, 1.11, 1.099, 1.12]):
        watched.observe(step, val_loss=val_loss, train_loss=1.0)
        stopped.append(watched.is_exhausted)
    assert stopped == [False] * 7 + [True], "less than min_delta better is not better"


def test_a_restored_judge_goes_on_alike() -> None:
    rng = np.random.default_rng(3)
    val, train = val_curve(rng, noise=0.01, turn=0.4)
    straight, restored = OverfitJudge(), OverfitJudge()
    num_found = 0
    for step in range(20):
        state = json.loads(json.dumps(restored.state_dict()))
        restored = OverfitJudge()
        restored.load_state_dict(state)
        losses = {"val_loss": float(val[step]), "train_loss": float(train[step])}
        is_overfit = straight.observe(step, **losses)
        assert restored.observe(step, **losses) == is_overfit
        num_found += is_overfit
        assert restored.state_dict() == straight.state_dict()
        assert restored.is_exhausted == straight.is_exhausted
    assert num_found


def test_the_state_of_a_version_that_kept_no_training_losses_goes_on() -> None:
    judge = OverfitJudge()
    judge.load_state_dict(
        {"val_losses": [1.2, 1.1, 1.0], "best_train": 0.8, "was_noted": False, "best_step": 2}
    )
    assert not judge.observe(3, val_loss=1.12, train_loss=0.5), (
        "what training was at the old best is not known"
    )
    assert not judge.observe(4, val_loss=0.95, train_loss=0.4) and judge.best_step == 4
