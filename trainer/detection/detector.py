"""Watches every step of a training and says what is abnormal; what is done about it is decided
elsewhere.

Nothing here waits for a device or talks to other ranks: it takes numbers that are already equal on
all ranks.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import ClassVar

from trainer.config import GuardRule
from trainer.detection.anomaly import (
    GRAD_NORM,
    LEVEL_NUMBERS,
    LOSS,
    VALID_TOKENS,
    Level,
    StepAnomaly,
)
from trainer.detection.rules import RuleWatch
from trainer.detection.steps import StepJudge, StepLimits, StepVerdict
from trainer.detection.watches import DeadWatch, Divergence, WarnLedger
from trainer.progress import Remembered

MAX_FIRST_LOSS = 5.0
"""In nats per token: a pretrained model starts below it on data that it can read."""


class Detector(Remembered):
    """`limits()` before a step, `observe()` after it: what is severe by the one is severe by
    the other.
    """

    KEPT: ClassVar = ("_steps", "_divergence", "_ledger", "_dead", "_rules")

    def __init__(
        self, rules: Iterable[GuardRule] = (), *, max_first_loss: float = MAX_FIRST_LOSS
    ) -> None:
        self._max_first_loss = max_first_loss
        self._steps, self._divergence, self._ledger = StepJudge(), Divergence(), WarnLedger()
        self._dead, self._rules = DeadWatch(), RuleWatch(rules)
        self._scores = {
            "guard/loss_z": 0.0,
            "guard/grad_z": 0.0,
            "guard/level": 0.0,
            "guard/spike_rate": 0.0,
        }

    @property
    def scores(self) -> Mapping[str, float]:
        """Of the step observed last, all finite; z is 0 where there is none."""
        return dict(self._scores)

    def limits(self) -> StepLimits:
        """For the coming step."""
        return self._steps.limits()

    def observe(self, step: int, values: Mapping[str, float]) -> tuple[StepAnomaly, ...]:
        """`values` has loss, gradient norm and number of label tokens of the finished step, and
        what rules name.
        """
        loss, grad_norm = float(values[LOSS]), float(values[GRAD_NORM])
        found: list[StepAnomaly | None] = [
            *self._rules.observe(step, values),
            self._dead.observe(step, values),
        ]
        self._scores |= {"guard/loss_z": 0.0, "guard/grad_z": 0.0}
        stands_out, is_finite = False, isfinite(loss) and isfinite(grad_norm)
        if is_finite and values[VALID_TOKENS] > 0:
            verdict = self._steps.judge(step, loss=loss, grad_norm=grad_norm)
            stands_out = verdict.stands_out
            found += self._judged(step, loss, grad_norm, verdict)
        else:
            self._steps.pass_over(step)
            self._ledger.count(step, is_spike=False)
            found.append(self._empty(step) if is_finite else _nonfinite(step, loss, grad_norm))
        anomalies = tuple(anomaly for anomaly in found if anomaly)
        levels = [anomaly.level for anomaly in anomalies]
        levels += [Level.WARN] * stands_out + [Level.DIVERGING] * self._divergence.is_diverging
        levels += [Level.DEAD] * self._dead.is_dead
        self._scores["guard/level"] = float(
            max((LEVEL_NUMBERS[level] for level in levels), default=0)
        )
        self._scores["guard/spike_rate"] = self._ledger.spike_rate
        return anomalies

    def _judged(
        self, step: int, loss: float, grad_norm: float, verdict: StepVerdict
    ) -> list[StepAnomaly | None]:
        """What there is to say about an ordinary step."""
        if verdict.usual_loss:
            self._scores["guard/loss_z"] = verdict.usual_loss.z(loss)
        if verdict.usual_grad:
            self._scores["guard/grad_z"] = verdict.usual_grad.z(grad_norm)
        found = [self._ledger.count(step, is_spike=verdict.stands_out)]
        if verdict.is_severe:
            found.append(_spike(Level.SEVERE, step, loss, grad_norm, verdict))
        elif verdict.stands_out and self._ledger.may_warn():
            found.append(_spike(Level.WARN, step, loss, grad_norm, verdict))
        elif verdict.usual_loss is None and loss > self._max_first_loss and self._ledger.may_warn():
            message = (
                f"{LOSS} starts at {loss:.4g}, above {self._max_first_loss:g}: check data, chat "
                f"template and model"
            )
            found.append(StepAnomaly(step, Level.WARN, LOSS, message, value=loss))
        return [*found, self._divergence.observe(step, loss)]

    def _empty(self, step: int) -> StepAnomaly | None:
        message = "this step's batch has no label token: nothing is learned from it; check truncation and labels"
        return (
            StepAnomaly(step, Level.WARN, VALID_TOKENS, message, value=0.0)
            if self._ledger.may_warn()
            else None
        )


def _spike(
    level: Level, step: int, loss: float, grad_norm: float, verdict: StepVerdict
) -> StepAnomaly:
    signal, value, usual = LOSS, loss, verdict.usual_loss
    if verdict.is_by_grad:
        signal, value, usual = GRAD_NORM, grad_norm, verdict.usual_grad
    assert usual is not None, "without a usual level no step stands out"
    z, ratio = usual.z(value), usual.ratio(value)
    times = f"{ratio:.3g} times " if ratio is not None else "far from "
    message = f"{signal} is {value:.4g}, {times}its usual {usual.level:.4g} (z {z:.1f})"
    return StepAnomaly(
        step,
        level,
        signal,
        message,
        value=value,
        centre=usual.level,
        z=z,
        ratio=ratio,
        onset=verdict.onset,
    )


def _nonfinite(step: int, loss: float, grad_norm: float) -> StepAnomaly:
    signal, value = (GRAD_NORM, grad_norm) if isfinite(loss) else (LOSS, loss)
    return StepAnomaly(step, Level.NONFINITE, signal, f"{signal} is {value}", onset=step)
