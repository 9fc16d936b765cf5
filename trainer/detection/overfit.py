"""Whether a model overfits, from its validation curve and the training loss at the same steps."""

from typing import ClassVar

from trainer.detection.robust import curve_noise
from trainer.progress import Remembered

NOTE_RISE, NOTE_SIGMAS = 0.02, 4.0
OVERFIT_RISE, OVERFIT_SIGMAS = 0.10, 8.0
"""A rise as a share of the best validation loss, and as a multiple of the curve's own noise; the larger counts."""
MIN_TRAIN_FALL = 0.01
"""Since the best validation: without it the model got worse at both, which is no overfitting."""


class OverfitJudge(Remembered):
    """Takes one validation after another."""

    KEPT: ClassVar = ("_val_losses", "_best_train", "_was_noted", "_num_unimproved", "_patient_best", "_best_step")

    def __init__(self, *, patience: int | None = None, min_delta: float = 0.0) -> None:
        """`patience`: validations in a row without a better one, by `min_delta` nats, that end a run; None: none do."""
        self._patience, self._min_delta = patience, min_delta
        self._val_losses: list[float] = []
        self._best_train = 0.0
        self._was_noted = False
        self._num_unimproved = 0
        self._patient_best = 0.0
        self._best_step = -1

    @property
    def best_step(self) -> int | None:
        """None until there is one."""
        return None if self._best_step < 0 else self._best_step

    @property
    def best_loss(self) -> float | None:
        return min(self._val_losses, default=None)

    @property
    def is_exhausted(self) -> bool:
        """Early stopping: no better validation loss for `patience` validations."""
        return self._patience is not None and self._num_unimproved >= self._patience

    def observe(self, step: int, *, val_loss: float, train_loss: float) -> bool:
        """Whether the model overfits: clearly above its best validation twice in a row, or far above it, while the
        training loss kept falling. `train_loss` is a level around the step. Both must be finite.
        """
        self._count_patience(val_loss)
        best = self.best_loss
        self._val_losses.append(val_loss)
        if best is None or val_loss < best:
            self._best_step, self._best_train, self._was_noted = step, train_loss, False
            return False
        rise, sigma = val_loss - best, curve_noise(self._val_losses)
        is_noted = rise > max(NOTE_RISE * abs(best), NOTE_SIGMAS * sigma)
        is_far = rise > max(OVERFIT_RISE * abs(best), OVERFIT_SIGMAS * sigma)
        has_train_fallen = train_loss < self._best_train - MIN_TRAIN_FALL * abs(self._best_train)
        is_overfit = is_noted and has_train_fallen and (self._was_noted or is_far)
        self._was_noted = is_noted
        return is_overfit

    def _count_patience(self, val_loss: float) -> None:
        if not self._val_losses or val_loss < self._patient_best - self._min_delta:
            self._patient_best, self._num_unimproved = val_loss, 0
        else:
            self._num_unimproved += 1
