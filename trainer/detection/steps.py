"""Whether one step stands out from those before it, by its loss and its gradient norm."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any

from trainer.detection.window import RobustWindow, Usual

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
"""A high gradient makes a severe loss of its own step and of those after it, so many steps in all."""


@dataclass(frozen=True)
class StepLimits:
    """When the coming step is severe, so that a device can decide alone; infinite where it cannot be.

    For finite values of a step that has label tokens: others are told apart before limits matter.
    """

    loss_with_grad: float = inf
    grad_with_loss: float = inf
    loss_alone: float = inf
    grad_alone: float = inf

    def is_severe(self, *, loss: float, grad_norm: float) -> bool:
        together = loss > self.loss_with_grad and grad_norm > self.grad_with_loss
        return together or loss > self.loss_alone or grad_norm > self.grad_alone


@dataclass(frozen=True)
class StepVerdict:
    """Of one step. `usual_*` is what it was compared with, None until enough steps are known."""

    stands_out: bool
    is_severe: bool
    is_by_grad: bool
    """The gradient, not the loss, is what stands out."""
    onset: int
    """First step of the last few that contributed."""
    usual_loss: Usual | None
    usual_grad: Usual | None


@dataclass(frozen=True)
class _Bounds:
    """What a value must exceed to stand out, from the windows alone."""

    loss_warn: float = inf
    loss_severe: float = inf
    grad_high: float = inf
    """Supports a severe loss."""
    grad_warn: float = inf
    grad_severe: float = inf


@dataclass(frozen=True)
class _Flags:
    """What an earlier step contributes to the judgement of the present one."""

    step: int
    is_loss_warn: bool
    is_grad_high: bool


class StepJudge:
    """`limits()` before a step and `judge()` after it speak of the same step and agree exactly."""

    def __init__(self) -> None:
        self._loss = RobustWindow(MIN_LOSS_SPREAD)
        self._grad = RobustWindow(MIN_GRAD_SPREAD)
        self._earlier: deque[_Flags] = deque(maxlen=max(NUM_WARN_STEPS, NUM_GRAD_STEPS) - 1)

    def limits(self) -> StepLimits:
        return self._limits(self._bounds())

    def judge(self, step: int, *, loss: float, grad_norm: float) -> StepVerdict:
        """Of a step whose loss and gradient norm are finite. The step becomes part of what is usual by `learn`."""
        bounds = self._bounds()
        limits = self._limits(bounds)
        now = _Flags(step, is_loss_warn=loss > bounds.loss_warn, is_grad_high=grad_norm > bounds.grad_high)
        flagged = [flags.step for flags in (*self._earlier, now) if flags.is_loss_warn or flags.is_grad_high]
        self._earlier.append(now)
        is_loss_severe = loss > limits.loss_alone or (loss > limits.loss_with_grad and now.is_grad_high)
        is_severe = limits.is_severe(loss=loss, grad_norm=grad_norm)
        return StepVerdict(
            stands_out=now.is_loss_warn or grad_norm > bounds.grad_warn or is_severe,
            is_severe=is_severe,
            is_by_grad=not is_loss_severe if is_severe else not now.is_loss_warn,
            onset=flagged[0] if is_severe and flagged else step,
            usual_loss=self._loss.usual,
            usual_grad=self._grad.usual,
        )

    def learn(self, *, loss: float, grad_norm: float) -> None:
        """A gradient of exactly zero says nothing about the usual size of gradients."""
        self._loss.push(loss)
        if grad_norm > 0:
            self._grad.push(grad_norm)

    def pass_over(self, step: int) -> None:
        """A step that cannot be judged still takes its place among the last few."""
        self._earlier.append(_Flags(step, is_loss_warn=False, is_grad_high=False))

    def _bounds(self) -> _Bounds:
        loss, grad = self._loss.usual, self._grad.usual
        loss_warn = loss_severe = grad_high = grad_warn = grad_severe = inf
        if loss:
            loss_warn = loss_severe = max(loss.at(LOSS_Z), loss.level + MIN_LOSS_RISE)
            if loss.is_log:  # a ratio to a level that may be zero or negative says nothing
                loss_warn = max(loss_warn, LOSS_WARN_RATIO * loss.level)
                loss_severe = max(loss_severe, LOSS_SEVERE_RATIO * loss.level)
        if grad:
            grad_high = grad.at(GRAD_WARN_Z)
            grad_warn = max(grad_high, GRAD_WARN_RATIO * grad.level)
            grad_severe = max(grad.at(GRAD_SEVERE_Z), GRAD_SEVERE_RATIO * grad.level)
        return _Bounds(loss_warn, loss_severe, grad_high, grad_warn, grad_severe)

    def _limits(self, bounds: _Bounds) -> StepLimits:
        earlier, loss_alone = list(self._earlier), inf
        if any(flags.is_grad_high for flags in earlier[1 - NUM_GRAD_STEPS :]):
            loss_alone = bounds.loss_severe
        if sum(flags.is_loss_warn for flags in earlier[1 - NUM_WARN_STEPS :]) >= NUM_WARNS - 1:
            loss_alone = min(loss_alone, bounds.loss_warn)
        return StepLimits(bounds.loss_severe, bounds.grad_high, loss_alone, bounds.grad_severe)

    def state_dict(self) -> dict[str, Any]:
        earlier = [[flags.step, int(flags.is_loss_warn), int(flags.is_grad_high)] for flags in self._earlier]
        return {"loss": self._loss.state(), "grad_norm": self._grad.state(), "earlier": earlier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loss.load(state_dict["loss"])
        self._grad.load(state_dict["grad_norm"])
        self._earlier.clear()
        for step, is_loss_warn, is_grad_high in state_dict["earlier"]:
            self._earlier.append(_Flags(int(step), bool(is_loss_warn), bool(is_grad_high)))
