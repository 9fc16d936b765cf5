"""Whether a model overfits, from its validation curve and the training loss at the same steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

MIN_NOISE_EVALS = 5
"""Fewer validations say nothing about the noise of their curve."""


class Verdict(StrEnum):
    """Of one validation."""

    OK = "ok"
    NOTE = "note"
    """Clearly above the best one so far."""
    OVERFIT = "overfit"
    """Again, or far above, while the training loss kept falling."""


@dataclass(frozen=True)
class OverfitSettings:
    """Shares of the best validation loss, or multiples of the curve's own noise; the larger counts."""

    note_rise: float = 0.02
    note_sigmas: float = 4.0
    overfit_rise: float = 0.10
    overfit_sigmas: float = 8.0
    min_train_fall: float = 0.01
    """Since the best validation: without it the model got worse at both, which is no overfitting."""
    patience: int = 3
    """Validations in a row without a new best one."""
    min_delta: float = 0.002
    """In nats: what counts as better."""


@dataclass(frozen=True)
class Overfitting:
    """A whole curve judged: `verdicts` by step of validation."""

    verdicts: dict[int, Verdict]
    best_step: int | None
    """Lowest validation loss; None without validations."""
    overfit_step: int | None
    """First validation that is overfit."""


class OverfitJudge:
    """Takes one validation after another. `best_step` and `overfit_step` are None until there is one."""

    def __init__(self, settings: OverfitSettings | None = None) -> None:
        self._settings = settings or OverfitSettings()
        self._val_losses: list[float] = []
        self._best_train = 0.0
        self._was_noted = False
        self._num_unimproved = 0
        self._patient_best = 0.0
        self.best_step: int | None = None
        self.overfit_step: int | None = None

    @property
    def best_loss(self) -> float | None:
        return min(self._val_losses, default=None)

    @property
    def is_exhausted(self) -> bool:
        """Early stopping: no better validation loss for `patience` validations."""
        return self._num_unimproved >= self._settings.patience

    def observe(self, step: int, *, val_loss: float, train_loss: float) -> Verdict:
        """`train_loss` is a level around the step, e.g. a mean since the last validation. Both must be finite."""
        self._count_patience(val_loss)
        best = self.best_loss
        self._val_losses.append(val_loss)
        if best is None or val_loss < best:
            self.best_step, self._best_train, self._was_noted = step, train_loss, False
            return Verdict.OK
        rise, sigma = val_loss - best, self.noise
        is_noted = rise > max(self._settings.note_rise * abs(best), self._settings.note_sigmas * sigma)
        is_far = rise > max(self._settings.overfit_rise * abs(best), self._settings.overfit_sigmas * sigma)
        has_train_fallen = train_loss < self._best_train - self._settings.min_train_fall * abs(self._best_train)
        is_overfit = is_noted and has_train_fallen and (self._was_noted or is_far)
        self._was_noted = is_noted
        if is_overfit and self.overfit_step is None:
            self.overfit_step = step
        return Verdict.OVERFIT if is_overfit else Verdict.NOTE if is_noted else Verdict.OK

    @property
    def noise(self) -> float:
        """Standard deviation of the curve's noise: of its second differences, which a smooth curve hardly has."""
        losses = self._val_losses
        if len(losses) < MIN_NOISE_EVALS:
            return 0.0
        bends = [
            abs(before - 2 * here + after) for before, here, after in zip(losses, losses[1:], losses[2:], strict=False)
        ]
        return 1.4826 * median(bends) / 6**0.5

    def _count_patience(self, val_loss: float) -> None:
        if not self._val_losses or val_loss < self._patient_best - self._settings.min_delta:
            self._patient_best, self._num_unimproved = val_loss, 0
        else:
            self._num_unimproved += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "val_losses": list(self._val_losses),
            "best_train": self._best_train,
            "was_noted": int(self._was_noted),
            "num_unimproved": self._num_unimproved,
            "patient_best": self._patient_best,
            "best_step": -1 if self.best_step is None else self.best_step,
            "overfit_step": -1 if self.overfit_step is None else self.overfit_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._val_losses = [float(loss) for loss in state_dict["val_losses"]]
        self._best_train = float(state_dict["best_train"])
        self._was_noted = bool(state_dict["was_noted"])
        self._num_unimproved = int(state_dict["num_unimproved"])
        self._patient_best = float(state_dict["patient_best"])
        self.best_step = None if state_dict["best_step"] < 0 else int(state_dict["best_step"])
        self.overfit_step = None if state_dict["overfit_step"] < 0 else int(state_dict["overfit_step"])


def judge(
    steps: Sequence[int],
    val_losses: Sequence[float],
    train_losses: Sequence[float],
    settings: OverfitSettings | None = None,
) -> Overfitting:
    """A finished curve: training losses at the steps of the validations, all of one length and finite."""
    judge = OverfitJudge(settings)
    verdicts = {
        int(step): judge.observe(int(step), val_loss=float(val_loss), train_loss=float(train_loss))
        for step, val_loss, train_loss in zip(steps, val_losses, train_losses, strict=True)
    }
    return Overfitting(verdicts, judge.best_step, judge.overfit_step)
