"""The detector, which compares every training step with the run's recent history.

It finds single steps that stand out, a loss that keeps rising, runs that learn nothing, and steps
that trigger a user's rule. It never waits for a device or another rank, because all its inputs are
equal on all ranks. The guard decides what to do.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite, nan
from statistics import median
from typing import Any, ClassVar

from trainer.config import GuardRule
from trainer.runtime.progress import Remembered
from trainer.train.detection.window import RobustWindow

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
VALID_TOKENS = "train/total_valid_token_count"

MAX_FIRST_LOSS = 5.0
"""Nats per token. A pretrained model starts below this loss on data in its own format."""
MIN_LOSS_SPREAD = 0.05
MIN_GRAD_SPREAD = 0.10
"""The smallest scales that a window may have, in nats of the signal's logarithm."""
LOSS_Z = 8.0
LOSS_WARN_RATIO = 1.5
LOSS_SEVERE_RATIO = 2.0
"""A loss stands out if its score, its ratio to the usual level, and its rise are all large."""
MIN_LOSS_RISE = 0.1
"""Nats. The loss of a memorised batch is tiny, so it may double without harm."""
GRAD_WARN_Z = 6.0
GRAD_WARN_RATIO = 5.0
GRAD_SEVERE_Z = 8.0
GRAD_SEVERE_RATIO = 50.0
NUM_WARNS = 3
NUM_WARN_STEPS = 5
"""The third loss warning within five steps is severe."""
NUM_GRAD_STEPS = 3
"""After a high gradient, a high loss in the same step or in the next two steps is severe."""

NUM_RECENT = 32
NUM_BEST = 64
"""The median of the last 32 steps is compared with the lowest median of 64 consecutive steps."""
MIN_RATIO = 1.25
"""The ratio to the best level that counts as diverging, if the rise exceeds `MIN_LOSS_RISE`."""
NUM_IN_A_ROW = 32
"""Steps for which the rise must last. The same number of steps without it ends the episode."""
MIN_GRAD_NORM = 1e-6
"""The model learns nothing from a smaller gradient norm."""
NUM_DEAD_STEPS = 10
REST_STEPS = 50
"""The shortest pause between two warnings, and the pause after a rule has acted, in steps."""


class Level(StrEnum):
    """The kind of trouble."""

    WARN = "warn"
    """One step stands out."""
    RULE = "rule"
    """The condition of a user's rule is met."""
    SEVERE = "severe"
    """The update of this step would damage the model."""
    DIVERGING = "diverging"
    """The loss has been rising for a while."""
    DEAD = "dead"
    """The model learns nothing."""
    NONFINITE = "nonfinite"
    """Loss or gradient is NaN or infinite."""


@dataclass(frozen=True)
class Anomaly:
    """One kind of trouble at one step."""

    step: int
    level: Level
    message: str
    """One sentence for the user."""
    onset: int
    """The step at which the trouble began."""
    action: str = ""
    """The action that the user's rule requests."""


@dataclass(frozen=True)
class StepLimits:
    """The limits beyond which the next step is a severe anomaly.

    The device compares the step's values with the limits, so it need not wait for the host.
    Infinity means no limit. The limits apply to finite values of a step with label tokens.
    """

    loss_with_grad: float = inf
    grad_with_loss: float = inf
    loss_alone: float = inf
    grad_alone: float = inf

    def are_exceeded(self, loss: Any, grad_norm: Any) -> Any:
        """Return True if the step is severe; takes two floats or two scalar tensors."""
        are_both = (loss > self.loss_with_grad) & (grad_norm > self.grad_with_loss)
        return are_both | (loss > self.loss_alone) | (grad_norm > self.grad_alone)

    def lowered_by(self, rules: Iterable[GuardRule]) -> "StepLimits":
        """Return these limits, lowered to the limits of rules that skip updates."""
        limits = self
        for rule in rules:
            if rule.action == "skip" and rule.above is not None:
                name = "loss_alone" if rule.metric == LOSS else "grad_alone"
                limits = replace(limits, **{name: min(getattr(limits, name), rule.above)})
        return limits


class _Spikes(Remembered):
    """Single steps whose loss or gradient norm stands out from the steps before them."""

    def __init__(self) -> None:
        self._loss = RobustWindow(MIN_LOSS_SPREAD)
        self._grad_norm = RobustWindow(MIN_GRAD_SPREAD)
        self._earlier = deque[tuple[int, bool, bool]](maxlen=NUM_WARN_STEPS - 1)
        """The previous steps: (number, loss deserves a warning, gradient is high)."""

    @property
    def is_ready(self) -> bool:
        """True if the window has enough steps to judge a loss."""
        return self._loss.usual.is_known

    def limits(self) -> StepLimits:
        """Return the limits for the next step, which is severe in any of three cases.

        1. Loss and gradient norm are both high.
        2. The gradient norm is extreme, regardless of the loss.
        3. The loss is high, and the gradient norm was high in one of the two steps before. Or the
           loss deserves a warning, as it did in at least two of the four steps before.
        """
        grad = self._grad_norm.usual
        loss_severe = self._high_loss(LOSS_SEVERE_RATIO)
        earlier = list(self._earlier)
        loss_alone = inf
        if any(is_grad_high for _, _, is_grad_high in earlier[1 - NUM_GRAD_STEPS :]):
            loss_alone = loss_severe
        if sum(is_loss_high for _, is_loss_high, _ in earlier) >= NUM_WARNS - 1:
            loss_alone = self._high_loss(LOSS_WARN_RATIO)
        return StepLimits(
            loss_with_grad=loss_severe,
            grad_with_loss=grad.at(GRAD_WARN_Z),
            loss_alone=loss_alone,
            grad_alone=max(grad.at(GRAD_SEVERE_Z), GRAD_SEVERE_RATIO * grad.level),
        )

    def scores(self, loss: float, grad_norm: float) -> dict[str, float]:
        """Return the distances from the usual levels, measured in scales."""
        return {
            "guard/loss_z": self._loss.usual.z(loss),
            "guard/grad_z": self._grad_norm.usual.z(grad_norm),
        }

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float,
    ) -> Anomaly | None:
        """Judge a step with finite values, then add them to the windows of usual values."""
        limits = self.limits()
        usual_grad = self._grad_norm.usual
        is_loss_high = loss > self._high_loss(LOSS_WARN_RATIO)
        is_grad_high = grad_norm > limits.grad_with_loss
        is_grad_spike = is_grad_high and grad_norm > GRAD_WARN_RATIO * usual_grad.level
        is_severe = limits.are_exceeded(loss, grad_norm)
        found = None
        if is_severe or is_loss_high or is_grad_spike:
            message = (
                f"{LOSS} is {loss:.4g}, usually {self._loss.usual.level:.4g}; "
                f"{GRAD_NORM} is {grad_norm:.4g}, usually {usual_grad.level:.4g}"
            )
            first = next((number for number, *flags in self._earlier if any(flags)), step)
            level, onset = (Level.SEVERE, first) if is_severe else (Level.WARN, step)
            found = Anomaly(step, level, message, onset)
        self._earlier.append((step, is_loss_high, is_grad_high))
        self._loss.push(loss)
        if grad_norm > 0:  # a gradient of exactly zero says nothing about the usual size
            self._grad_norm.push(grad_norm)
        return found

    def pass_over(self, step: int) -> None:
        """Add a step that cannot be judged to the previous steps."""
        self._earlier.append((step, False, False))

    def _high_loss(self, ratio: float) -> float:
        usual = self._loss.usual
        return max(usual.at(LOSS_Z), usual.level + MIN_LOSS_RISE, ratio * usual.level)


class _Divergence(Remembered):
    """Finds a loss that stays above the best level of the run. Each episode is reported once."""

    def __init__(self) -> None:
        self._values = deque[float](maxlen=NUM_BEST)
        self._best = 0.0
        self._is_diverging = False
        self._num_in_a_row = 0
        """Consecutive steps above the bound outside an episode, or below it inside one."""
        self._first_step = 0

    def observe(self, step: int, loss: float) -> Anomaly | None:
        """Judge the finite loss of a step."""
        is_first = len(self._values) < NUM_BEST
        self._values.append(loss)
        if len(self._values) < NUM_BEST:
            return None
        losses = list(self._values)
        level = median(losses)
        recent = median(losses[-NUM_RECENT:])
        self._best = level if is_first else min(self._best, level)
        is_above = recent > self._best + max((MIN_RATIO - 1) * self._best, MIN_LOSS_RISE)
        # An episode begins or ends only after enough consecutive steps that contradict its state.
        if is_above == self._is_diverging:
            self._num_in_a_row = 0
            return None
        if self._num_in_a_row == 0:
            self._first_step = step
        self._num_in_a_row += 1
        if self._num_in_a_row < NUM_IN_A_ROW:
            return None
        self._num_in_a_row = 0
        self._is_diverging = is_above
        if not is_above:
            return None
        # a median crosses the bound when half of its steps are above the bound
        onset = max(0, self._first_step - NUM_RECENT // 2)
        message = (
            f"{LOSS} has risen from {self._best:.4g} at best to {recent:.4g}, since about step "
            f"{onset}"
        )
        return Anomaly(step, Level.DIVERGING, message, onset)


class _NoLearning(Remembered):
    """Finds `NUM_DEAD_STEPS` consecutive steps from which the model learns nothing.

    Each such stretch is reported once. It ends at the next step from which the model learns.
    """

    def __init__(self) -> None:
        self._num_dead_steps = 0

    def observe(self, step: int, values: Mapping[str, float]) -> Anomaly | None:
        if values[VALID_TOKENS] == 0:
            cause = "no label token in any batch: check data and template"
        elif values[LOSS] == 0:
            cause = "the loss is exactly 0: check labels and mask"
        elif abs(values[GRAD_NORM]) < MIN_GRAD_NORM:
            cause = "the gradient vanished: check labels and weights"
        else:
            self._num_dead_steps = 0
            return None
        self._num_dead_steps += 1
        if self._num_dead_steps != NUM_DEAD_STEPS:
            return None
        message = f"nothing learned for {NUM_DEAD_STEPS} steps: {cause}"
        return Anomaly(step, Level.DEAD, message, max(0, step - NUM_DEAD_STEPS + 1))


class _Warnings(Remembered):
    """Limits the number of warnings: each warning doubles the pause before the next one.

    If nothing stands out for another full pause after a pause ends, the next pause is `REST_STEPS`
    again.
    """

    def __init__(self) -> None:
        self._pause = REST_STEPS
        self._pause_end = 0

    def is_given(self, step: int) -> bool:
        """Return True if a step that stands out should cause a warning. If so, start a new pause."""
        if step < self._pause_end:
            return False
        is_calm = step >= self._pause_end + self._pause
        self._pause = REST_STEPS if is_calm else 2 * self._pause
        self._pause_end = step + self._pause
        return True


class _Rules(Remembered):
    """Counts the consecutive steps that meet the condition of each rule.

    A rule that a checkpoint lacks starts at zero. Rules that skip updates are not counted, because
    the device carries them out.
    """

    KEPT: ClassVar = ("_num_in_a_row", "_resting")

    def __init__(self, rules: Iterable[GuardRule]) -> None:
        self._rules = {rule.text: rule for rule in rules if rule.action != "skip"}
        self._num_in_a_row = dict.fromkeys(self._rules, 0)
        self._resting = dict.fromkeys(self._rules, 0)
        self._num_absent = dict.fromkeys(self._rules, 0)
        """Steps of this attempt before the first one that logs the metric of a rule."""

    def observe(self, step: int, values: Mapping[str, float]) -> Iterator[Anomaly]:
        """Yield an anomaly for each rule that acts after `step`.

        The condition of a rule is not met at a step that did not log its metric. A rule whose
        metric is still missing after `REST_STEPS` steps is reported once.
        """
        for text, rule in self._rules.items():
            if rule.metric in values:
                self._num_absent.pop(text, None)
            elif text in self._num_absent:
                self._num_absent[text] += 1
                if self._num_absent[text] == REST_STEPS:
                    message = f"rule '{text}' has no effect: this run does not log {rule.metric}"
                    yield Anomaly(step, Level.WARN, message, step)
            value = values.get(rule.metric, nan)
            count = self._num_in_a_row[text] + 1 if rule.holds(value) else 0
            self._num_in_a_row[text] = count
            if self._resting[text] > 0:
                self._resting[text] -= 1
            elif count >= rule.num_steps:
                self._resting[text] = REST_STEPS
                message = f"rule '{text}': {rule.metric} is {value:.4g}"
                onset = max(0, step - count + 1)
                yield Anomaly(step, Level.RULE, message, onset, rule.action)


class Detector(Remembered):
    """Judges steps. `limits()` before a step and `observe()` after it agree on severe anomalies."""

    KEPT: ClassVar = ("_steps", "_divergence", "_warnings", "_dead", "_rules")

    def __init__(
        self, rules: Iterable[GuardRule] = (), *, max_first_loss: float = MAX_FIRST_LOSS
    ) -> None:
        self._max_first_loss = max_first_loss
        self._steps = _Spikes()
        self._divergence = _Divergence()
        self._warnings = _Warnings()
        self._dead = _NoLearning()
        self._rules = _Rules(rules)
        self.scores: Mapping[str, float] = {}
        """Metrics of the last observed step, all finite."""

    def limits(self) -> StepLimits:
        """Return the limits for the next step."""
        return self._steps.limits()

    def observe(self, step: int, values: Mapping[str, float]) -> list[Anomaly]:
        """Judge a finished step.

        `values`: its loss, gradient norm and number of label tokens, and the metrics in rules.
        """
        found = [*self._rules.observe(step, values), self._dead.observe(step, values)]
        loss = values[LOSS]
        grad_norm = values[GRAD_NORM]
        own = self._unjudgeable(step, values)
        if own is not None:
            self.scores = {"guard/loss_z": 0.0, "guard/grad_z": 0.0}
            self._steps.pass_over(step)
        else:
            self.scores = self._steps.scores(loss, grad_norm)
            high_start = self._high_start(step, loss)
            own = self._steps.observe(step, loss, grad_norm) or high_start
            found.append(self._divergence.observe(step, loss))
        if own is not None and (own.level != Level.WARN or self._warnings.is_given(step)):
            found.append(own)
        return [anomaly for anomaly in found if anomaly is not None]

    def _unjudgeable(self, step: int, values: Mapping[str, float]) -> Anomaly | None:
        """Return an anomaly if the loss and gradient cannot be compared with previous steps."""
        for key in (LOSS, GRAD_NORM):
            if not isfinite(values[key]):
                return Anomaly(step, Level.NONFINITE, f"{key} is {values[key]}", onset=step)
        if values[VALID_TOKENS] == 0:
            message = "this batch has no label token: check truncation and labels"
            return Anomaly(step, Level.WARN, message, onset=step)
        return None

    def _high_start(self, step: int, loss: float) -> Anomaly | None:
        if self._steps.is_ready or loss <= self._max_first_loss:
            return None
        message = (
            f"{LOSS} starts at {loss:.4g}, above {self._max_first_loss:g}: check data, chat "
            f"template and model"
        )
        return Anomaly(step, Level.WARN, message, onset=step)
