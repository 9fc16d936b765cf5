"""Overfitting and early stopping, from curves of validation and training losses."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from curves import val_curve

from trainer.train.detection.validations import ValidationWatch

NUM_RUNS = 300


def judged(
    val_losses: Sequence[float], train_losses: Sequence[float]
) -> tuple[list[int], ValidationWatch]:
    """The validations that are told to overfit, and the watch after them. It is restored from its
    state before each.
    """
    watch, found = ValidationWatch(), []
    for step, (val, train) in enumerate(zip(val_losses, train_losses, strict=True)):
        state = json.loads(json.dumps(watch.state_dict()))
        watch = ValidationWatch()
        watch.load_state_dict(state)
        if watch.observe(step, val_loss=float(val), train_loss=float(train)):
            found.append(step)
    return found, watch


@pytest.mark.covers("S3.43", "S3.32")
@pytest.mark.parametrize(
    ("val", "train", "expected"),
    [
        ([1.5, 1.3, 1.4, 1.6], [1.2, 0.8, 0.5, 0.3], [3]),  # the example of the requirements
        ([1.5, 1.0, 1.11], [1.2, 0.8, 0.5], [2]),  # a far rise at once
        ([1.5, 1.0, 1.3, 1.6], [1.2, 0.8, 0.8, 0.795], []),  # training did not fall
        ([1.0, 1.05, 1.01, 1.05], [1.0, 0.9, 0.8, 0.7], []),  # two rises, not in a row
        ([1.0, 1.05, 1.05], [1.0, 0.9, 0.8], [2]),
        # 5 % over the best one, twice: overfitting on a smooth curve, nothing on one with 2 % noise
        ([1.2, 1.15, 1.1, 1.05, 1.0, 1.05, 1.05], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [6]),
        ([1.2, 1.12, 1.14, 1.03, 1.0, 1.05, 1.05], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], []),
    ],
)
def test_overfitting_is_a_lasting_rise_while_training_improves(val, train, expected):
    found, watch = judged(val, train)
    assert found == expected and watch.best_step == int(np.argmin(val))


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01])
def test_overfitting_is_found_and_healthy_curves_are_not_called_so(noise):
    rng = np.random.default_rng(2)
    num_false = num_missed = num_far = 0
    for _ in range(NUM_RUNS):
        num_false += bool(judged(*val_curve(rng, noise=noise, turn=1.0))[0])
        val, train = val_curve(rng, noise=noise, turn=0.5)
        steps, watch = judged(val, train)
        num_missed += not steps
        num_far += watch.best_step != int(np.argmin(val))
    assert (num_missed, num_far) == (0, 0), "seed 2"
    assert num_false <= 0.01 * NUM_RUNS, "seed 2; 0.3 % over many runs"


@pytest.mark.covers("S2.36")
def test_early_stopping_waits_for_its_patience():
    watch = ValidationWatch(patience=3)
    assert watch.best_step is None
    stopped = []
    for step, val_loss in enumerate([1.5, 1.2, 1.199, 1.21, 1.1, 1.11, 1.099, 1.12]):
        watch.observe(step, val_loss=val_loss, train_loss=1.0)
        stopped.append(watch.is_exhausted)
    assert stopped == [False] * 7 + [True], "0.001 better is not better"
