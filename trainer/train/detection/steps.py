"""Find single steps that stand out from the steps before them, by loss and gradient norm."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from trainer.runtime.progress import Remembered
from trainer.train.detection.anomaly import GRAD_NORM, LOSS, Anomaly, Level
from trainer.train.detection.window import RobustWindow

MIN_LOSS_SPREAD, MIN_GRAD_SPREAD = 0.05, 0.10
"""The smallest spreads that count, in nats of the logarithm."""
LOSS_Z, LOSS_WARN_RATIO, LOSS_SEVERE_RATIO = 8.0, 1.5, 2.0
"""A loss stands out by its distance from the usual level in spreads, and by its ratio to it."""
MIN_LOSS_RISE = 0.1
"""In nats, for warnings and severe steps: a memorised batch may double its tiny loss."""
GRAD_WARN_Z, GRAD_WARN_RATIO = 6.0, 5.0
GRAD_SEVERE_Z, GRAD_SEVERE_RATIO = 8.0, 50.0
NUM_WARNS, NUM_WARN_STEPS = 3, 5
"""The third loss warning within five steps is severe."""
NUM_GRAD_STEPS = 3
"""A high gradient makes a severe loss of its own step and of the two after it."""


@dataclass(frozen=True)
class StepLimits:
    """The limits beyond which the coming step is severe, so that the device decides alone; infinity
    means no limit. They apply to finite values of a step with label tokens.
    """

    loss_with_grad: float = inf
    grad_with_loss: float = inf
    loss_alone: float = inf
    grad_alone: float = inf


class _Bounds(NamedTuple):
    loss_warn: float
    loss_severe: float
    """Severe if the gradient is high too."""
    grad_high: float
    grad_warn: float
    grad_severe: float


class SpikeWatch(Remembered):
    """Judge single steps: `limits()` before a step and `observe()` after it agree exactly on what
    is severe.
    """

    KEPT: ClassVar = ("_loss", "_grad_norm", "_earlier")

    def __init__(self) -> None:
        self._loss = RobustWindow(MIN_LOSS_SPREAD)
        self._grad_norm = RobustWindow(MIN_GRAD_SPREAD)
        self._earlier = deque[tuple[int, bool, bool]](maxlen=NUM_WARN_STEPS - 1)
        """The steps before: number, loss above its warning bound, gradient high."""

    @property
    def is_ready(self) -> bool:
        """Return whether enough steps are known to judge a loss."""
        return self._loss.usual.is_known

    def limits(self) -> StepLimits:
        return self._limits(self._bounds())

    def scores(self, loss: float, grad_norm: float) -> dict[str, float]:
        """Return the distances from the usual levels in spreads."""
        return {
            "guard/loss_z": self._loss.usual.z(loss),
            "guard/grad_z": self._grad_norm.usual.z(grad_norm),
        }

    def observe(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        """Judge a step with finite values, and count it as part of what is usual."""
        bounds = self._bounds()
        limits = self._limits(bounds)
        is_loss_high, is_grad_high = loss > bounds.loss_warn, grad_norm > bounds.grad_high
        is_loss_severe = loss > limits.loss_alone or (loss > bounds.loss_severe and is_grad_high)
        is_severe = is_loss_severe or grad_norm > bounds.grad_severe
        found = None
        if is_severe or is_loss_high or grad_norm > bounds.grad_warn:
            signal, value, usual = LOSS, loss, self._loss.usual
            if not (is_loss_severe if is_severe else is_loss_high):
                signal, value, usual = GRAD_NORM, grad_norm, self._grad_norm.usual
            message = f"{signal} is {value:.4g}, usually {usual.level:.4g} (z {usual.z(value):.1f})"
            first = next((number for number, *flags in self._earlier if any(flags)), step)
            level, onset = (Level.SEVERE, first) if is_severe else (Level.WARN, step)
            found = Anomaly(step, level, signal, message, onset)
        self._earlier.append((step, is_loss_high, is_grad_high))
        self._loss.push(loss)
        if grad_norm > 0:  # a gradient of exactly zero says nothing about the usual size
            self._grad_norm.push(grad_norm)
        return found

    def pass_over(self, step: int) -> None:
        """Count a step that cannot be judged as one of the last few."""
        self._earlier.append((step, False, False))

    def _bounds(self) -> _Bounds:
        loss, grad = self._loss.usual, self._grad_norm.usual
        lowest = max(loss.at(LOSS_Z), loss.level + MIN_LOSS_RISE)
        grad_high = grad.at(GRAD_WARN_Z)
        return _Bounds(
            loss_warn=max(lowest, LOSS_WARN_RATIO * loss.level),
            loss_severe=max(lowest, LOSS_SEVERE_RATIO * loss.level),
            grad_high=grad_high,
            grad_warn=max(grad_high, GRAD_WARN_RATIO * grad.level),
            grad_severe=max(grad.at(GRAD_SEVERE_Z), GRAD_SEVERE_RATIO * grad.level),
        )

    def _limits(self, bounds: _Bounds) -> StepLimits:
        earlier, loss_alone = list(self._earlier), inf
        if any(is_grad_high for _, _, is_grad_high in earlier[1 - NUM_GRAD_STEPS :]):
            loss_alone = bounds.loss_severe
        if sum(is_warn for _, is_warn, _ in earlier) >= NUM_WARNS - 1:
            loss_alone = min(loss_alone, bounds.loss_warn)
        return StepLimits(bounds.loss_severe, bounds.grad_high, loss_alone, bounds.grad_severe)
