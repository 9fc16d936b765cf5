"""Whether one step stands out from those before it, by its loss and its gradient norm."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from trainer.detection.window import RobustWindow, Usual
from trainer.progress import Remembered

MIN_LOSS_SPREAD, MIN_GRAD_SPREAD = 0.05, 0.10
"""In nats of the logarithm."""
LOSS_Z, LOSS_WARN_RATIO, LOSS_SEVERE_RATIO = 8.0, 1.5, 2.0
"""A loss stands out by spreads above the usual level and by its ratio to that."""
MIN_LOSS_RISE = 0.1
"""In nats, for warning and severe alike: a memorised batch may double its tiny loss."""
GRAD_WARN_Z, GRAD_WARN_RATIO = 6.0, 5.0
GRAD_SEVERE_Z, GRAD_SEVERE_RATIO = 8.0, 50.0
NUM_WARNS, NUM_WARN_STEPS = 3, 5
"""So many loss warnings within so many steps make the last of them severe."""
NUM_GRAD_STEPS = 3
"""A high gradient makes a severe loss of its own step and of those after it, so many steps in
all.
"""


@dataclass(frozen=True)
class StepLimits:
    """When the coming step is severe, so that a device can decide alone; infinite where it cannot
    be.

    For finite values of a step that has label tokens: others are told apart before limits matter.
    """

    loss_with_grad: float = inf
    grad_with_loss: float = inf
    loss_alone: float = inf
    grad_alone: float = inf

    def is_severe(self, *, loss: float, grad_norm: float) -> bool:
        together = loss > self.loss_with_grad and grad_norm > self.grad_with_loss
        return together or loss > self.loss_alone or grad_norm > self.grad_alone


class StepVerdict(NamedTuple):
    """Of one step. `usual_*` is what it was compared with, None until enough steps are known."""

    stands_out: bool
    is_severe: bool
    is_by_grad: bool
    """The gradient, not the loss, is what stands out."""
    onset: int
    """First step of the last few that contributed."""
    usual_loss: Usual | None
    usual_grad: Usual | None


class StepJudge(Remembered):
    """`limits()` before a step and `judge()` after it speak of the same step and agree exactly."""

    KEPT: ClassVar = ("_loss", "_grad_norm", "_earlier")

    def __init__(self) -> None:
        self._loss, self._grad_norm = RobustWindow(MIN_LOSS_SPREAD), RobustWindow(MIN_GRAD_SPREAD)
        self._earlier = deque[tuple[int, bool, bool]](
            maxlen=max(NUM_WARN_STEPS, NUM_GRAD_STEPS) - 1
        )
        """Steps before, whether their loss was worth a warning, and whether their gradient was
        high.
        """

    def limits(self) -> StepLimits:
        grad, earlier, loss_alone = self._grad_norm.usual, list(self._earlier), inf
        loss_warn, loss_severe = self._loss_bounds()
        if any(is_grad_high for _, _, is_grad_high in earlier[1 - NUM_GRAD_STEPS :]):
            loss_alone = loss_severe
        if sum(is_warn for _, is_warn, _ in earlier[1 - NUM_WARN_STEPS :]) >= NUM_WARNS - 1:
            loss_alone = min(loss_alone, loss_warn)
        if grad is None:
            return StepLimits(loss_severe, inf, loss_alone, inf)
        grad_severe = max(grad.at(GRAD_SEVERE_Z), GRAD_SEVERE_RATIO * grad.level)
        return StepLimits(loss_severe, grad.at(GRAD_WARN_Z), loss_alone, grad_severe)

    def judge(self, step: int, *, loss: float, grad_norm: float) -> StepVerdict:
        """Of a step whose loss and gradient norm are finite, which becomes part of what is usual.

        A gradient of exactly zero says nothing about the usual size of gradients.
        """
        limits, usual_loss, usual_grad = self.limits(), self._loss.usual, self._grad_norm.usual
        is_loss_warn, is_grad_high = (
            loss > self._loss_bounds()[0],
            grad_norm > limits.grad_with_loss,
        )
        is_grad_warn = (
            usual_grad is not None
            and is_grad_high
            and grad_norm > GRAD_WARN_RATIO * usual_grad.level
        )
        onset = next((earlier for earlier, *flags in self._earlier if any(flags)), step)
        self._earlier.append((step, is_loss_warn, is_grad_high))
        is_loss_severe = loss > limits.loss_alone or (loss > limits.loss_with_grad and is_grad_high)
        is_severe = limits.is_severe(loss=loss, grad_norm=grad_norm)
        self._loss.push(loss)
        if grad_norm > 0:
            self._grad_norm.push(grad_norm)
        return StepVerdict(
            stands_out=is_loss_warn or is_grad_warn or is_severe,
            is_severe=is_severe,
            is_by_grad=not is_loss_severe if is_severe else not is_loss_warn,
            onset=onset if is_severe else step,
            usual_loss=usual_loss,
            usual_grad=usual_grad,
        )

    def pass_over(self, step: int) -> None:
        """A step that cannot be judged still takes its place among the last few."""
        self._earlier.append((step, False, False))

    def _loss_bounds(self) -> tuple[float, float]:
        """What a loss must exceed to be worth a warning, and to be severe with a high gradient."""
        if (usual := self._loss.usual) is None:
            return inf, inf
        bound = max(usual.at(LOSS_Z), usual.level + MIN_LOSS_RISE)
        if not usual.is_log:  # a ratio to a level that may be zero or negative says nothing
            return bound, bound
        return max(bound, LOSS_WARN_RATIO * usual.level), max(
            bound, LOSS_SEVERE_RATIO * usual.level
        )
