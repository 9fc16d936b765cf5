"""User-defined rules: a limit on a metric, the number of steps beyond the limit, and an action."""

from collections.abc import Sequence

from trainer.config import ConfigError, GuardRule, did_you_mean
from trainer.tracking import metrics
from trainer.train.detection.detector import GRAD_NORM, LOSS


def require_usable_rules(rules: Sequence[GuardRule]) -> None:
    """Raise `ConfigError` for a rule that the guard cannot evaluate or carry out."""
    for number, rule in enumerate(rules):
        place = f"'trainer.guard.rules[{number}]"
        if (rule.above is None) == (rule.below is None):
            raise ConfigError(f"{place}' has no single limit. Fix: set either 'above' or 'below'")
        if not metrics.is_signal(rule.metric):
            known = [key for key in metrics.METRICS if metrics.is_signal(key)]
            hint = did_you_mean(rule.metric, known) or f"choose one of {', '.join(known)}"
            raise ConfigError(
                f"{place}.metric' is '{rule.metric}', which the guard cannot read: {hint}"
            )
        # the device must decide to skip an update before the other metrics are known
        can_skip = rule.metric in (LOSS, GRAD_NORM) and rule.below is None and rule.num_steps == 1
        if rule.action == "skip" and not can_skip:
            raise ConfigError(
                f"{place}.do' cannot be 'skip'. Fix: use 'skip' with {LOSS} or {GRAD_NORM}, "
                f"'above' and without 'for'"
            )
