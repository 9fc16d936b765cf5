"""Overfitting and early stopping, from curves of validation and training losses."""

import json

import numpy as np
import pytest

from trainer.train.detection.validations import ValidationWatch


def judged(val_losses, train_losses):
    """Return the validations that count as overfitting, and the watch after them. It is restored
    from its state before each validation.
    """
    watch = ValidationWatch()
    found = []
    for step, (val, train) in enumerate(zip(val_losses, train_losses, strict=True)):
        state = json.loads(json.dumps(watch.state_dict()))
        watch = ValidationWatch()
        watch.load_state_dict(state)
        if watch.observe(step, val_loss=float(val), train_loss=float(train)):
            found.append(step)
    return found, watch


@pytest.mark.covers("S3.43 S3.32")
@pytest.mark.parametrize(
    ("val", "train", "expected"),
    [
        ([1.5, 1.3, 1.4, 1.6], [1.2, 0.8, 0.5, 0.3], [3]),  # the example of the requirements
        ([1.5, 1.0, 1.11], [1.2, 0.8, 0.5], [2]),  # a far rise at once
        ([1.5, 1.0, 1.3, 1.6], [1.2, 0.8, 0.8, 0.795], []),  # training did not fall
        ([1.0, 1.05, 1.01, 1.05], [1.0, 0.9, 0.8, 0.7], []),  # two rises, not in a row
        # 5 % over the best one, twice: overfitting on a smooth curve, nothing on one with 2 % noise
        ([1.2, 1.15, 1.1, 1.05, 1.0, 1.05, 1.05], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [6]),
        ([1.2, 1.12, 1.14, 1.03, 1.0, 1.05, 1.05], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], []),
    ],
)
def test_overfitting_is_a_lasting_rise_while_training_improves(val, train, expected):
    found, watch = judged(val, train)
    assert found == expected and watch.best_step == int(np.argmin(val))
