"""Watch every step of a training and name what is abnormal; the guard decides what to do.

Nothing here waits for a device or talks to other ranks: the numbers are already equal on all ranks.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import ClassVar

from trainer.config import GuardRule
from trainer.runtime.progress import Remembered
from trainer.train.detection.anomaly import GRAD_NORM, LOSS, VALID_TOKENS, Anomaly, Level
from trainer.train.detection.rules import RuleWatch
from trainer.train.detection.steps import SpikeWatch, StepLimits
from trainer.train.detection.watches import Divergence, NoLearning, SpikeLedger

MAX_FIRST_LOSS = 5.0
"""In nats per token: a pretrained model starts below it on data that it can read."""
EMPTY = (
    "this step's batch has no label token: nothing is learned from it; check truncation and labels"
)


class Detector(Remembered):
    """Judge steps: `limits()` before a step and `observe()` after it agree on what is severe."""

    KEPT: ClassVar = ("_steps", "_divergence", "_ledger", "_dead", "_rules")

    def __init__(
        self, rules: Iterable[GuardRule] = (), *, max_first_loss: float = MAX_FIRST_LOSS
    ) -> None:
        self._max_first_loss = max_first_loss
        self._steps, self._divergence, self._ledger = SpikeWatch(), Divergence(), SpikeLedger()
        self._dead, self._rules = NoLearning(), RuleWatch(rules)
        self.scores: Mapping[str, float] = {}
        """Metrics of the step observed last, all finite."""

    def limits(self) -> StepLimits:
        """Return the limits of the coming step."""
        return self._steps.limits()

    def observe(self, step: int, values: Mapping[str, float]) -> list[Anomaly]:
        """Judge a finished step. `values` has its loss, gradient norm and number of label tokens,
        and the metrics that rules name.
        """
        loss, grad_norm = values[LOSS], values[GRAD_NORM]
        found = [*self._rules.observe(step, values), self._dead.observe(step, values)]
        bad = next((key for key in (LOSS, GRAD_NORM) if not isfinite(values[key])), None)
        own = spike = None
        if bad:
            own = Anomaly(step, Level.NONFINITE, bad, f"{bad} is {values[bad]}", onset=step)
        elif values[VALID_TOKENS] == 0:
            own = Anomaly(step, Level.WARN, VALID_TOKENS, EMPTY, onset=step)
        if own:
            self.scores = {"guard/loss_z": 0.0, "guard/grad_z": 0.0}
            self._steps.pass_over(step)
        else:
            self.scores = self._steps.scores(loss, grad_norm)
            if not self._steps.is_ready and loss > self._max_first_loss:
                message = (
                    f"{LOSS} starts at {loss:.4g}, above {self._max_first_loss:g}: check data, "
                    f"chat template and model"
                )
                own = Anomaly(step, Level.WARN, LOSS, message, onset=step)
            spike = self._steps.observe(step, loss, grad_norm)
            own = spike or own
            found.append(self._divergence.observe(step, loss))
        found.append(self._ledger.count(step, is_spike=spike is not None))
        if own and (own.level != Level.WARN or self._ledger.may_warn()):
            found.append(own)
        return [anomaly for anomaly in found if anomaly]
