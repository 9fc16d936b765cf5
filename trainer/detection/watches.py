"""What must last for some steps to count: a rising loss, a run that learns nothing,
heavy-tailed steps, overfitting.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import nan
from typing import ClassVar

from trainer.detection.anomaly import GRAD_NORM, LOSS, VALID_TOKENS, Level, StepAnomaly
from trainer.detection.window import curve_noise, quantile
from trainer.progress import Remembered

NUM_RECENT, NUM_BEST = 32, 64
"""The median of so many last steps is judged against the lowest median of so many steps in a
row.
"""
MIN_RATIO, MIN_RISE = 1.25, 0.1
"""The rise that counts: as a ratio, and in nats."""
NUM_IN_A_ROW = 32
"""The excess must last so many steps; as many without it end the episode."""
MIN_GRAD_NORM = 1e-6
"""A gradient below it moves nothing."""
NUM_DEAD_STEPS = 10
RATE_STEPS = 1000
"""Rates are per so many steps."""
MIN_STEPS_BETWEEN = 50
"""Between two warnings."""
MAX_SINGLES = 10
"""More steps than this per 1000 that stood out alone are a property of the data; half of it
ends that.
"""


class Divergence(Remembered):
    """Whether the loss has been rising for a while, compared with the best level it ever held; one
    finite loss per step. An episode is told once, when it has lasted long enough.
    """

    KEPT: ClassVar = ("_values", "_best", "is_diverging", "_num_in_a_row", "_first_step")

    def __init__(self) -> None:
        self._values = deque[float](maxlen=NUM_BEST)
        self._best = 0.0
        self.is_diverging = False
        self._num_in_a_row = 0
        """Steps above the bound outside an episode, steps below it inside one."""
        self._first_step = 0

    def observe(self, step: int, loss: float) -> StepAnomaly | None:
        is_first = len(self._values) < NUM_BEST
        self._values.append(loss)
        if len(self._values) < NUM_BEST:
            return None
        best = quantile(sorted(self._values), 0.5)
        self._best = best if is_first else min(self._best, best)
        recent = quantile(sorted(list(self._values)[-NUM_RECENT:]), 0.5)
        # written as a distance, so that it also works for a best level at or below zero
        is_above = recent > self._best + max((MIN_RATIO - 1) * abs(self._best), MIN_RISE)
        if is_above == self.is_diverging:
            self._num_in_a_row = 0
            return None
        if self._num_in_a_row == 0:
            self._first_step = step
        self._num_in_a_row += 1
        if self._num_in_a_row < NUM_IN_A_ROW:
            return None
        self._num_in_a_row, self.is_diverging = 0, not self.is_diverging
        return self._episode(step, recent) if self.is_diverging else None

    def _episode(self, step: int, recent: float) -> StepAnomaly:
        best = self._best
        # a median crosses when half of its steps are above
        onset = max(0, self._first_step - NUM_RECENT // 2)
        message = (
            f"{LOSS} has risen from {best:.4g} at best to {recent:.4g}, since about step {onset}"
        )
        ratio = recent / best if best > 0 else None
        return StepAnomaly(
            step,
            Level.DIVERGING,
            LOSS,
            message,
            value=recent,
            centre=best,
            ratio=ratio,
            onset=onset,
        )


class DeadWatch(Remembered):
    """Says once that nothing has been learned for `NUM_DEAD_STEPS` in a row, and again after a
    live step.
    """

    KEPT: ClassVar = ("_num_in_a_row", "is_dead")

    def __init__(self) -> None:
        self._num_in_a_row = {VALID_TOKENS: 0, LOSS: 0, GRAD_NORM: 0}
        self.is_dead = False

    def observe(self, step: int, values: Mapping[str, float]) -> StepAnomaly | None:
        signs = {
            VALID_TOKENS: (
                values[VALID_TOKENS] == 0,
                "no label token in any batch: check data and chat template",
            ),
            LOSS: (values[LOSS] == 0, "the loss is exactly 0: check labels and mask"),
            GRAD_NORM: (
                abs(values[GRAD_NORM]) < MIN_GRAD_NORM,
                "the gradient vanished: check labels and weights",
            ),
        }
        for signal, (is_dead, _) in signs.items():
            self._num_in_a_row[signal] = self._num_in_a_row[signal] + 1 if is_dead else 0
        dead = [signal for signal, count in self._num_in_a_row.items() if count >= NUM_DEAD_STEPS]
        was_dead, self.is_dead = self.is_dead, bool(dead)
        if was_dead or not dead:
            return None
        count = self._num_in_a_row[dead[0]]
        message = f"nothing learned for {count} steps: {signs[dead[0]][1]}"
        onset = max(0, step - count + 1)
        return StepAnomaly(step, Level.DEAD, dead[0], message, value=values[dead[0]], onset=onset)


class WarnLedger(Remembered):
    """Counts steps that stood out: warnings of them are rationed, and a heavy tail is told once.

    Steps are numbered by itself: a step that is trained again counts again.
    """

    KEPT: ClassVar = (
        "_num_steps",
        "_spikes",
        "_singles",
        "_num_spikes_in_a_row",
        "_last_warning",
        "_is_heavy",
    )

    def __init__(self) -> None:
        self._num_steps = 0
        self._spikes = deque[int]()
        self._singles = deque[int]()
        """Those that stood out while both neighbours did not."""
        self._num_spikes_in_a_row = 0
        self._last_warning = -MIN_STEPS_BETWEEN
        self._is_heavy = False

    @property
    def spike_rate(self) -> float:
        """Steps that stood out per 1000, over the last 1000."""
        return len(self._spikes) * RATE_STEPS / max(1, min(self._num_steps, RATE_STEPS))

    def count(self, step: int, *, is_spike: bool) -> StepAnomaly | None:
        """Take note of a step; says so when it has just become clear that batches are
        heavy-tailed.
        """
        self._num_steps += 1
        if not is_spike and self._num_spikes_in_a_row == 1:
            self._singles.append(self._num_steps - 1)
        self._num_spikes_in_a_row = self._num_spikes_in_a_row + 1 if is_spike else 0
        if is_spike:
            self._spikes.append(self._num_steps)
        for steps in (self._spikes, self._singles):
            while steps and steps[0] <= self._num_steps - RATE_STEPS:
                steps.popleft()
        count, was_heavy = len(self._singles), self._is_heavy
        self._is_heavy = count > (MAX_SINGLES // 2 if was_heavy else MAX_SINGLES)
        if was_heavy or not self._is_heavy:
            return None
        message = f"heavy-tailed batches ({count} single steps stood out lately): look at the samples of one, by a rule"
        return StepAnomaly(step, Level.ADVISORY, LOSS, message, value=float(count))

    def may_warn(self) -> bool:
        """Whether a warning about the step counted last may be given; if so, it counts as given."""
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
    """note: clearly above the best so far; overfit: the second in a row, or far above, while
    training still improves.

    `train_losses` are those around each validation; both have one entry per validation. Where the
    training loss too is above that of the best until the next validation, the run has become
    unstable and does not overfit.
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


class OverfitJudge(Remembered):
    """Takes one validation after another."""

    KEPT: ClassVar = (
        "_val_losses",
        "_train_losses",
        "_num_unimproved",
        "_patient_best",
        "_best_step",
    )

    def __init__(self, *, patience: int | None = None, min_delta: float = 0.0) -> None:
        """`patience`: validations in a row without a better one, by `min_delta` nats, that end
        a run; None: none do.
        """
        self._patience, self._min_delta = patience, min_delta
        self._val_losses: list[float] = []
        self._train_losses: list[float] = []
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
        """Whether the model overfits: `judge_validations`. `train_loss` is a level around the
        step; both are finite.
        """
        self._count_patience(val_loss)
        if self.best_loss is None or val_loss < self.best_loss:
            self._best_step = step
        # in the state of an older version
        unknown = [nan] * (len(self._val_losses) - len(self._train_losses))
        self._val_losses.append(val_loss)
        self._train_losses = [*unknown, *self._train_losses, train_loss]
        return judge_validations(self._val_losses, self._train_losses)[-1] == "overfit"

    def _count_patience(self, val_loss: float) -> None:
        if not self._val_losses or val_loss < self._patient_best - self._min_delta:
            self._patient_best, self._num_unimproved = val_loss, 0
        else:
            self._num_unimproved += 1
