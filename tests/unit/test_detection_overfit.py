"""Overfitting, early stopping and rising epochs, from curves of validation and training losses."""

import json

import numpy as np
import pytest
from curves import val_curve

from trainer.detection.overfit import OverfitJudge, OverfitSettings, Verdict, judge

OK, NOTE, OVERFIT = Verdict.OK, Verdict.NOTE, Verdict.OVERFIT
NUM_RUNS = 300


@pytest.mark.covers("S3.43", "S3.32")
def test_the_example_of_the_requirements() -> None:
    found = judge([500, 1000, 1500, 2000], [1.5, 1.3, 1.4, 1.6], [1.2, 0.8, 0.5, 0.3])
    assert found.verdicts == {500: OK, 1000: OK, 1500: NOTE, 2000: OVERFIT}
    assert (found.best_step, found.overfit_step) == (1000, 2000)


def test_a_far_rise_is_overfitting_at_once() -> None:
    assert [*judge([1, 2, 3], [1.5, 1.0, 1.11], [1.2, 0.8, 0.5]).verdicts.values()] == [OK, OK, OVERFIT]


def test_a_training_loss_that_did_not_fall_is_no_overfitting() -> None:
    found = judge([1, 2, 3, 4], [1.5, 1.0, 1.3, 1.6], [1.2, 0.8, 0.8, 0.795])
    assert [*found.verdicts.values()] == [OK, OK, NOTE, NOTE]
    assert found.overfit_step is None


def test_two_notes_must_stand_in_a_row() -> None:
    assert [*judge(range(4), [1.0, 1.05, 1.01, 1.05], [1.0, 0.9, 0.8, 0.7]).verdicts.values()] == [OK, NOTE, OK, NOTE]
    assert [*judge(range(3), [1.0, 1.05, 1.05], [1.0, 0.9, 0.8]).verdicts.values()] == [OK, NOTE, OVERFIT]


def test_a_noisy_curve_needs_a_larger_rise() -> None:
    """The same 5% over the best one: a NOTE on a smooth curve, nothing on one that jumps by 2%."""
    smooth = [1.2, 1.15, 1.1, 1.05, 1.0, 1.05]
    noisy = [1.2, 1.12, 1.14, 1.03, 1.0, 1.05]
    assert [*judge(range(6), smooth, smooth).verdicts.values()][-1] == NOTE
    assert [*judge(range(6), noisy, noisy).verdicts.values()][-1] == OK


def test_no_validation_has_no_best_step() -> None:
    found = judge([], [], [])
    assert (found.verdicts, found.best_step, found.overfit_step) == ({}, None, None)


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01])
def test_healthy_validation_curves_are_hardly_ever_called_overfit(noise: float) -> None:
    rng = np.random.default_rng(1)
    found = [judge(range(20), *val_curve(rng, noise=noise, turn=1.0)) for _ in range(NUM_RUNS)]
    assert sum(result.overfit_step is not None for result in found) <= 0.01 * NUM_RUNS, "seed 1; 0.3% over many runs"


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01])
def test_overfitting_is_found_and_the_best_checkpoint_with_it(noise: float) -> None:
    rng = np.random.default_rng(2)
    num_late = num_missed = num_far = 0
    for _ in range(NUM_RUNS):
        val, train = val_curve(rng, noise=noise, turn=0.5)
        found = judge(range(20), val, train)
        num_missed += found.overfit_step is None
        risen = int(np.argmax((np.arange(20) > 10) & (val > 1.06 * val.min())))
        num_late += found.overfit_step is not None and found.overfit_step > risen + 3
        num_far += found.best_step != int(np.argmin(val))
    assert (num_missed, num_far) == (0, 0), "seed 2"
    assert num_late <= 0.02 * NUM_RUNS, "seed 2"


@pytest.mark.covers("S2.36")
def test_early_stopping_waits_for_its_patience() -> None:
    watched = OverfitJudge(OverfitSettings(patience=3, min_delta=0.002))
    stopped = []
    for step, val_loss in enumerate([1.5, 1.2, 1.199, 1.21, 1.1, 1.11, 1.099, 1.12]):
        watched.observe(step, val_loss=val_loss, train_loss=1.0)
        stopped.append(watched.is_exhausted)
    assert stopped == [False] * 7 + [True], "less than min_delta better is not better"


def test_a_restored_judge_goes_on_alike() -> None:
    rng = np.random.default_rng(3)
    val, train = val_curve(rng, noise=0.01, turn=0.4)
    straight, restored = OverfitJudge(), OverfitJudge()
    for step in range(20):
        state = json.loads(json.dumps(restored.state_dict()))
        restored = OverfitJudge()
        restored.load_state_dict(state)
        losses = {"val_loss": float(val[step]), "train_loss": float(train[step])}
        assert restored.observe(step, **losses) == straight.observe(step, **losses)
        assert restored.state_dict() == straight.state_dict()
        assert restored.is_exhausted == straight.is_exhausted
    assert straight.overfit_step is not None
