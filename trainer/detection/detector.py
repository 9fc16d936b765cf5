"""Watches every step of a training and says what is abnormal; what is done about it is decided elsewhere.

Nothing here waits for a device or talks to other ranks: it takes numbers that are already equal on all ranks.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from trainer.detection.anomaly import LEVEL_NUMBERS, Level, StepAnomaly
from trainer.detection.divergence import Divergence
from trainer.detection.ledger import WarnLedger
from trainer.detection.rules import UserRule
from trainer.detection.steps import StepJudge, StepLimits, StepVerdict
from trainer.detection.watches import GRAD_NORM, LOSS, VALID_TOKENS, DeadWatch, RuleWatch

MAX_FIRST_LOSS = 5.0
"""In nats per token: a pretrained model starts below it on data that it can read."""


class Detector:
    """`limits()` before a step, `observe()` after it: what is severe by the one is severe by the other."""

    def __init__(self, rules: Iterable[UserRule] = (), *, max_first_loss: float = MAX_FIRST_LOSS) -> None:
        self._max_first_loss = max_first_loss
        self._judge, self._divergence, self._ledger = StepJudge(), Divergence(), WarnLedger()
        self._dead, self._rules = DeadWatch(), RuleWatch(rules)
        self._scores = {"guard/loss_z": 0.0, "guard/grad_z": 0.0, "guard/level": 0.0, "guard/spike_rate": 0.0}

    @property
    def scores(self) -> Mapping[str, float]:
        """Of the step observed last, all finite; z is 0 where there is none."""
        return dict(self._scores)

    def limits(self) -> StepLimits:
        """For the coming step."""
        return self._judge.limits()

    def observe(self, step: int, values: Mapping[str, float]) -> tuple[StepAnomaly, ...]:
        """`values` has loss, gradient norm and number of label tokens of the finished step, and what rules name."""
        loss, grad_norm = values[LOSS], values[GRAD_NORM]
        found: list[StepAnomaly | None] = [*self._rules.observe(step, values), self._dead.observe(step, values)]
        levels = [LEVEL_NUMBERS[Level.DEAD] if self._dead.is_dead else 0]
        self._scores |= {"guard/loss_z": 0.0, "guard/grad_z": 0.0}
        is_finite = isfinite(loss) and isfinite(grad_norm)
        if not is_finite or values[VALID_TOKENS] == 0:
            self._judge.pass_over(step)
            self._ledger.count(is_spike=False)
            found.append(self._empty(step) if is_finite else _nonfinite(step, loss, grad_norm))
        else:
            verdict = self._judge.judge(step, loss=loss, grad_norm=grad_norm)
            levels.append(int(verdict.stands_out))
            found += self._judged(step, loss, grad_norm, verdict)
        if self._divergence.is_diverging:
            levels.append(LEVEL_NUMBERS[Level.DIVERGING])
        anomalies = tuple(anomaly for anomaly in found if anomaly)
        levels += [LEVEL_NUMBERS[anomaly.level] for anomaly in anomalies]
        self._scores |= {"guard/level": float(max(levels)), "guard/spike_rate": self._ledger.spike_rate}
        return anomalies

    def _judged(self, step: int, loss: float, grad_norm: float, verdict: StepVerdict) -> list[StepAnomaly | None]:
        """What there is to say about an ordinary step; it becomes part of what is usual."""
        if verdict.usual_loss:
            self._scores["guard/loss_z"] = verdict.usual_loss.z(loss)
        if verdict.usual_grad:
            self._scores["guard/grad_z"] = verdict.usual_grad.z(grad_norm)
        found: list[StepAnomaly | None] = []
        if self._ledger.count(is_spike=verdict.stands_out):
            found.append(self._advisory(step))
        if verdict.is_severe:
            found.append(_spike(Level.SEVERE, step, loss, grad_norm, verdict))
        elif verdict.stands_out and self._ledger.may_warn():
            found.append(_spike(Level.WARN, step, loss, grad_norm, verdict))
        elif verdict.usual_loss is None and loss > self._max_first_loss and self._ledger.may_warn():
            found.append(self._high_start(step, loss))
        self._judge.learn(loss=loss, grad_norm=grad_norm)
        if self._divergence.observe(step, loss):
            found.append(self._diverging(step))
        return found

    def _empty(self, step: int) -> StepAnomaly | None:
        message = "this step's batch has no label token: nothing is learned from it; check truncation and labels"
        return StepAnomaly(step, Level.WARN, VALID_TOKENS, message, value=0.0) if self._ledger.may_warn() else None

    def _high_start(self, step: int, loss: float) -> StepAnomaly:
        most = self._max_first_loss
        message = f"{LOSS} starts at {loss:.4g}, above {most:g}: check data, chat template and model"
        return StepAnomaly(step, Level.WARN, LOSS, message, value=loss)

    def _advisory(self, step: int) -> StepAnomaly:
        count = self._ledger.num_singles
        message = f"heavy-tailed batches ({count} single steps stood out lately): look at the samples of one, by a rule"
        return StepAnomaly(step, Level.ADVISORY, LOSS, message, value=float(count))

    def _diverging(self, step: int) -> StepAnomaly:
        median, best, onset = self._divergence.recent_median, self._divergence.best, self._divergence.onset
        message = f"{LOSS} has risen from {best:.4g} at best to {median:.4g}, since about step {onset}"
        ratio = median / best if best > 0 else None
        return StepAnomaly(step, Level.DIVERGING, LOSS, message, value=median, centre=best, ratio=ratio, onset=onset)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, lists and mappings only; JSON keeps it exactly."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state_dict[name])

    def _parts(self) -> Mapping[str, StepJudge | Divergence | WarnLedger | DeadWatch | RuleWatch]:
        return {
            "steps": self._judge,
            "divergence": self._divergence,
            "ledger": self._ledger,
            "dead": self._dead,
            "rules": self._rules,
        }


def _spike(level: Level, step: int, loss: float, grad_norm: float, verdict: StepVerdict) -> StepAnomaly:
    signal, value, usual = LOSS, loss, verdict.usual_loss
    if verdict.is_by_grad:
        signal, value, usual = GRAD_NORM, grad_norm, verdict.usual_grad
    assert usual is not None, "without a usual level no step stands out"
    z, ratio = usual.z(value), usual.ratio(value)
    times = f"{ratio:.3g} times " if ratio is not None else "far from "
    message = f"{signal} is {value:.4g}, {times}its usual {usual.level:.4g} (z {z:.1f})"
    return StepAnomaly(
        step, level, signal, message, value=value, centre=usual.level, z=z, ratio=ratio, onset=verdict.onset
    )


def _nonfinite(step: int, loss: float, grad_norm: float) -> StepAnomaly:
    signal, value = (GRAD_NORM, grad_norm) if isfinite(loss) else (LOSS, loss)
    return StepAnomaly(step, Level.NONFINITE, signal, f"{signal} is {value}", onset=step)
