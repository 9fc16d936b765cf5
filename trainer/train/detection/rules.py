"""Rules of the user: a limit on a metric, the steps for which it must be exceeded, and the answer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, nan
from typing import ClassVar

from trainer.config import ConfigError, GuardRule, did_you_mean
from trainer.runtime.progress import Remembered
from trainer.tracking import metrics
from trainer.train.detection.anomaly import GRAD_NORM, LOSS, Anomaly, Level
from trainer.train.detection.steps import StepLimits

REST_STEPS = 50
"""A rule that has acted does not act again for this many steps."""


def require_usable_rules(rules: Sequence[GuardRule]) -> None:
    """Raise `ConfigError` for a rule without exactly one limit, or one that the guard cannot
    evaluate or carry out.
    """
    for number, rule in enumerate(rules):
        place = f"'trainer.guard.rules[{number}]"
        if (rule.above is None) == (rule.below is None):
            raise ConfigError(
                f"{place}' needs one limit on {rule.metric}. Fix: set either 'above' or 'below'"
            )
        if not metrics.is_signal(rule.metric):
            known = [key for key in metrics.METRICS if metrics.is_signal(key)]
            hint = did_you_mean(rule.metric, known) or f"choose one of {', '.join(known)}"
            raise ConfigError(
                f"{place}.metric' is '{rule.metric}', which the guard does not see: {hint}"
            )
        is_known_in_time = rule.metric in (LOSS, GRAD_NORM) and rule.above is not None
        if rule.action == "skip" and not (is_known_in_time and rule.num_steps == 1):
            raise ConfigError(
                f"{place}.do' is 'skip' for {rule.metric}: an update is skipped before other "
                f"metrics are known. Fix: use skip with {LOSS} or {GRAD_NORM} 'above' a number, "
                f"without 'for'"
            )


def skip_limits(rules: Iterable[GuardRule]) -> StepLimits:
    """Return the smallest limits of the rules with the action `skip`, which the device applies
    before an update.
    """
    limits = {LOSS: inf, GRAD_NORM: inf}
    for rule in rules:
        if rule.action == "skip" and rule.above is not None:
            limits[rule.metric] = min(limits[rule.metric], rule.above)
    return StepLimits(loss_alone=limits[LOSS], grad_alone=limits[GRAD_NORM])


class RuleWatch(Remembered):
    """Count for how many consecutive steps each rule holds, and report those that act at a step.

    A rule that is not in a checkpoint's state starts from zero.
    """

    KEPT: ClassVar = ("_num_in_a_row", "_resting")

    def __init__(self, rules: Iterable[GuardRule]) -> None:
        self._rules = {rule.text: rule for rule in rules}
        self._num_in_a_row = dict.fromkeys(self._rules, 0)
        self._resting = dict.fromkeys(self._rules, 0)

    def observe(self, step: int, values: Mapping[str, float]) -> Iterator[Anomaly]:
        """Yield the rules that act after `step`; a rule on a metric that the step lacks does not
        hold.
        """
        for text, rule in self._rules.items():
            value = values.get(rule.metric, nan)
            count = self._num_in_a_row[text] + 1 if rule.holds(value) else 0
            self._num_in_a_row[text] = count
            if self._resting[text] > 0:
                self._resting[text] -= 1
            elif count >= rule.num_steps:
                self._resting[text] = REST_STEPS
                message = f"rule '{text}': {rule.metric} is {value:.4g}"
                onset = max(0, step - count + 1)
                yield Anomaly(step, Level.RULE, rule.metric, message, onset, rule.action)
