"""Find what must last for some steps to count: a rising loss, a run that learns nothing,
heavy-tailed steps, overfitting.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import ClassVar

from trainer.runtime.progress import Remembered
from trainer.train.detection.anomaly import GRAD_NORM, LOSS, VALID_TOKENS, Anomaly, Level
from trainer.train.detection.window import curve_noise

NUM_RECENT, NUM_BEST = 32, 64
"""The median of the last 32 steps is judged against the lowest median of 64 steps in a row."""
MIN_RATIO, MIN_RISE = 1.25, 0.1
"""The rise that counts: as a ratio, and in nats."""
NUM_IN_A_ROW = 32
"""The excess must last this many steps; as many without it end the episode."""
MIN_GRAD_NORM = 1e-6
"""A smaller gradient moves nothing."""
NUM_DEAD_STEPS = 10
RATE_STEPS = 1000
MIN_STEPS_BETWEEN = 50
"""Between two warnings."""
MAX_SINGLES = 10
"""More steps than this in 1000 that stood out alone are a property of the data; half of it
ends that.
"""


class Divergence(Remembered):
    """Compare the loss with the best level it ever held. An episode is told once, when the loss
    has been above for long enough.
    """

    KEPT: ClassVar = ("_values", "_best", "_is_diverging", "_num_in_a_row", "_first_step")

    def __init__(self) -> None:
        self._values = deque[float](maxlen=NUM_BEST)
        self._best = 0.0
        self._is_diverging = False
        self._num_in_a_row = 0
        """Steps above the bound outside an episode, steps below it inside one."""
        self._first_step = 0

    def observe(self, step: int, loss: float) -> Anomaly | None:
        """Judge the finite loss of a step."""
        is_first = len(self._values) < NUM_BEST
        self._values.append(loss)
        if len(self._values) < NUM_BEST:
            return None
        losses = list(self._values)
        level, recent = median(losses), median(losses[-NUM_RECENT:])
        self._best = level if is_first else min(self._best, level)
        is_above = recent > self._best + max((MIN_RATIO - 1) * self._best, MIN_RISE)
        if is_above == self._is_diverging:
            self._num_in_a_row = 0
            return None
        if self._num_in_a_row == 0:
            self._first_step = step
        self._num_in_a_row += 1
        if self._num_in_a_row < NUM_IN_A_ROW:
            return None
        self._num_in_a_row, self._is_diverging = 0, is_above
        if not is_above:
            return None
        # a median crosses when half of its steps are above
        onset = max(0, self._first_step - NUM_RECENT // 2)
        message = (
            f"{LOSS} has risen from {self._best:.4g} at best to {recent:.4g}, since about step "
            f"{onset}"
        )
        return Anomaly(step, Level.DIVERGING, LOSS, message, onset)


class NoLearning(Remembered):
    """Tell once that nothing has been learned for `NUM_DEAD_STEPS` in a row, and again after a
    live step.
    """

    KEPT: ClassVar = ("_num_dead_steps",)

    def __init__(self) -> None:
        self._num_dead_steps = 0

    def observe(self, step: int, values: Mapping[str, float]) -> Anomaly | None:
        if values[VALID_TOKENS] == 0:
            signal, cause = VALID_TOKENS, "no label token in any batch: check data and template"
        elif values[LOSS] == 0:
            signal, cause = LOSS, "the loss is exactly 0: check labels and mask"
        elif abs(values[GRAD_NORM]) < MIN_GRAD_NORM:
            signal, cause = GRAD_NORM, "the gradient vanished: check labels and weights"
        else:
            self._num_dead_steps = 0
            return None
        self._num_dead_steps += 1
        if self._num_dead_steps != NUM_DEAD_STEPS:
            return None
        message = f"nothing learned for {NUM_DEAD_STEPS} steps: {cause}"
        return Anomaly(step, Level.DEAD, signal, message, max(0, step - NUM_DEAD_STEPS + 1))


class SpikeLedger(Remembered):
    """Count steps that stood out: ration warnings of them, and tell once that they are common.

    It numbers steps itself: a step that is trained again counts again.
    """

    KEPT: ClassVar = ("_num_steps", "_spikes", "_last_warning", "_is_heavy")

    def __init__(self) -> None:
        self._num_steps = 0
        self._spikes = deque[int]()
        """Of the last `RATE_STEPS`."""
        self._last_warning = -MIN_STEPS_BETWEEN
        self._is_heavy = False

    def count(self, step: int, *, is_spike: bool) -> Anomaly | None:
        """Count a step; tell when it has just become clear that batches are heavy-tailed."""
        self._num_steps += 1
        if is_spike:
            self._spikes.append(self._num_steps)
        while self._spikes and self._spikes[0] <= self._num_steps - RATE_STEPS:
            self._spikes.popleft()
        # steps that stood out while both neighbours did not
        num_singles = sum(
            spike < self._num_steps and not {spike - 1, spike + 1} & set(self._spikes)
            for spike in self._spikes
        )
        was_heavy = self._is_heavy
        self._is_heavy = num_singles > (MAX_SINGLES // 2 if was_heavy else MAX_SINGLES)
        if was_heavy or not self._is_heavy:
            return None
        message = (
            f"heavy-tailed batches ({num_singles} single steps stood out lately): look at the "
            f"samples of one, by a rule"
        )
        return Anomaly(step, Level.ADVISORY, LOSS, message, onset=step)

    def may_warn(self) -> bool:
        """Return whether the step counted last may be warned of; if so, the warning counts as
        given.
        """
        if self._is_heavy or self._num_steps - self._last_warning < MIN_STEPS_BETWEEN:
            return False
        self._last_warning = self._num_steps
        return True


OVERFITTING: Mapping[str, float] = {
    "overfit_note": 0.02,  # rise over the best validation loss, as a share of it
    "overfit_note_sigma": 4,  # and in standard deviations of the curve; the larger counts
    "overfit_sure": 0.10,
    "overfit_sure_sigma": 8,
    "overfit_train_fall": 0.01,  # training loss must have fallen this much since the best
}


def judge_validations(
    val_losses: Sequence[float],
    train_losses: Sequence[float],
    limits: Mapping[str, float] = OVERFITTING,
) -> list[str]:
    """Return a verdict for each validation: `note` if it is clearly above the best so far,
    `overfit` if it is the second such in a row, or far above, while training still improves.

    `train_losses` has the level of the training loss around each validation. Where the training
    loss also is above that of the best until the next validation, the run has become unstable and
    does not overfit.
    """
    sigma, verdicts, best = curve_noise(val_losses), list[str](), 0
    for index, loss in enumerate(val_losses):
        if loss < val_losses[best]:
            best = index
        level, rise = abs(val_losses[best]), loss - val_losses[best]
        is_noted, is_sure = (
            rise > max(limits[f"overfit_{name}"] * level, limits[f"overfit_{name}_sigma"] * sigma)
            for name in ("note", "sure")
        )
        fallen = train_losses[best] - limits["overfit_train_fall"] * abs(train_losses[best])
        is_second = bool(verdicts) and verdicts[-1] != "ok"
        is_overfit = (is_second or is_sure) and all(
            trained < fallen for trained in train_losses[index : index + 2]
        )
        verdicts.append("ok" if not is_noted else "overfit" if is_overfit else "note")
    return verdicts


class ValidationWatch(Remembered):
    """Remember the validations of a run: the best one, overfitting, and early stopping."""

    KEPT: ClassVar = ("_val_losses", "_train_losses", "_best_step")

    def __init__(self, *, patience: int | None = None, min_delta: float = 0.0) -> None:
        """Set `patience`, the number of validations in a row, none better by `min_delta` nats, that
        ends a run; None: no early stopping.
        """
        self._patience, self._min_delta = patience, min_delta
        self._val_losses: list[float] = []
        self._train_losses: list[float] = []
        self._best_step = -1

    @property
    def best_step(self) -> int | None:
        """The step of the lowest validation loss."""
        return None if self._best_step < 0 else self._best_step

    @property
    def best_loss(self) -> float:
        return min(self._val_losses, default=inf)

    @property
    def is_exhausted(self) -> bool:
        """Return whether the last `patience` validations brought no better loss."""
        best, num_unimproved = inf, 0
        for loss in self._val_losses:
            is_better = loss < best - self._min_delta
            best, num_unimproved = (loss, 0) if is_better else (best, num_unimproved + 1)
        return self._patience is not None and num_unimproved >= self._patience

    def observe(self, step: int, *, val_loss: float, train_loss: float) -> bool:
        """Return whether the model overfits (`judge_validations`). Both losses are finite;
        `train_loss` is a level around the step.
        """
        if val_loss < self.best_loss:
            self._best_step = step
        self._val_losses.append(val_loss)
        self._train_losses.append(train_loss)
        return judge_validations(self._val_losses, self._train_losses)[-1] == "overfit"
