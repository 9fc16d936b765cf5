"""Judge a run's validations, for overfitting and early stopping."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from trainer.runtime.progress import Remembered
from trainer.train.detection.window import curve_noise

NOTE_RISE = 0.02
NOTE_SIGMAS = 4
"""A rise over the best validation loss is noted if it exceeds both this share of the best loss and
this number of standard deviations of the curve's noise.
"""
SURE_RISE = 0.10
SURE_SIGMAS = 8
"""Limits beyond which a single rise counts as overfitting."""
TRAIN_FALL = 0.01
"""The share by which the training loss must have fallen since the best validation."""
MIN_DELTA = 0.002
"""Nats by which a validation loss must improve to postpone early stopping."""


def judge_validations(val_losses: Sequence[float], train_losses: Sequence[float]) -> list[str]:
    """Return a verdict for each validation: "ok", "note" or "overfit".

    "note": the loss is clearly above the best so far. "overfit": the training loss still falls, and
    the validation loss is far above the best, or clearly above it for the second time in a row.

    `train_losses` holds the level of the training loss around each validation. If the training loss
    at this or the next validation is not below its level at the best validation, the run has become
    unstable rather than overfitted.
    """
    sigma = curve_noise(val_losses)
    verdicts: list[str] = []
    best = 0
    for index, loss in enumerate(val_losses):
        if loss < val_losses[best]:
            best = index
        level = abs(val_losses[best])
        rise = loss - val_losses[best]
        is_noted = rise > max(NOTE_RISE * level, NOTE_SIGMAS * sigma)
        is_sure = rise > max(SURE_RISE * level, SURE_SIGMAS * sigma)
        fallen = train_losses[best] - TRAIN_FALL * abs(train_losses[best])
        is_improving = all(trained < fallen for trained in train_losses[index : index + 2])
        is_lasting = bool(verdicts) and verdicts[-1] != "ok"
        if not is_noted:
            verdicts.append("ok")
        elif is_improving and (is_lasting or is_sure):
            verdicts.append("overfit")
        else:
            verdicts.append("note")
    return verdicts


class ValidationWatch(Remembered):
    """Remembers a run's validations, to find the best one, overfitting, and the time to stop early.

    `patience` validations in a row without a better loss end a run; None turns early stopping off.
    `rows` is the fingerprint of the validation rows.
    """

    KEPT: ClassVar = ("_val_losses", "_train_losses", "_best_step", "_rows")

    def __init__(self, *, patience: int | None = None, rows: str = "") -> None:
        self._patience = patience
        self._rows = rows
        self._val_losses: list[float] = []
        self._train_losses: list[float] = []
        self._best_step = -1

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the validations, unless they measured different rows: such losses are not
        comparable.
        """
        if state_dict.get("rows", self._rows) == self._rows:
            super().load_state_dict(state_dict)

    @property
    def best_step(self) -> int | None:
        """The step of the lowest validation loss."""
        return None if self._best_step < 0 else self._best_step

    @property
    def best_loss(self) -> float:
        return min(self._val_losses, default=inf)

    @property
    def is_exhausted(self) -> bool:
        """True if none of the last `patience` validations improved the loss."""
        best = inf
        num_unimproved = 0
        for loss in self._val_losses:
            is_better = loss < best - MIN_DELTA
            best, num_unimproved = (loss, 0) if is_better else (best, num_unimproved + 1)
        return self._patience is not None and num_unimproved >= self._patience

    def observe(
        self,
        step: int,
        *,
        val_loss: float,
        train_loss: float,
    ) -> bool:
        """Add a validation, and return True if the model overfits.

        Both losses must be finite. `train_loss`: the level of the training loss around the step.
        """
        if val_loss < self.best_loss:
            self._best_step = step
        self._val_losses.append(val_loss)
        self._train_losses.append(train_loss)
        return judge_validations(self._val_losses, self._train_losses)[-1] == "overfit"
