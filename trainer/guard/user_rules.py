"""The user's rules (`trainer.guard.rules`) against what the guard knows and can do; no torch."""

from collections.abc import Sequence
from math import inf

from trainer import metrics
from trainer.config import ConfigError, did_you_mean
from trainer.detection import RuleError, StepLimits, UserRule, parse_rule


def parse_rules(texts: Sequence[str]) -> tuple[UserRule, ...]:
    """Raises `ConfigError` for a rule that cannot be read, or asks for what the guard cannot know or do."""
    try:
        rules = tuple(parse_rule(text) for text in texts)
        require_known_keys(rules)
        skip_limits(rules)
    except (RuleError, ValueError) as error:
        raise ConfigError(f"'trainer.guard.rules': {error}") from error
    return rules


def require_known_keys(rules: Sequence[UserRule]) -> None:
    """Raises `ValueError` for a rule about a metric the guard does not see: ranks could not agree on it."""
    for rule in rules:
        if unknown := [key for key in rule.keys if not metrics.is_signal(key)]:
            seen = [metric.key for metric in metrics.by_group() if metrics.is_signal(metric.key)]
            hint = did_you_mean(unknown[0], seen) or f"it sees {', '.join(seen)}"
            raise ValueError(f"rule '{rule.text}': the guard does not see '{unknown[0]}'; {hint}")


def skip_limits(rules: Sequence[UserRule]) -> StepLimits:
    """What rules with the action `skip` ask of the device, which knows nothing but loss and gradient norm.

    Raises `ValueError` for such a rule that is more than `train/loss > x` or `train/grad_norm > x`.
    """
    found = {"train/loss": inf, "train/grad_norm": inf}
    for rule in rules:
        if "skip" not in rule.actions:
            continue
        key, limit = rule.upper_limit or ("", inf)
        if key not in found:
            raise ValueError(
                f"rule '{rule.text}': an update is left out before its other metrics are known; skip goes with "
                f"'train/loss > number' or 'train/grad_norm > number' alone"
            )
        found[key] = min(found[key], limit)
    return StepLimits(loss_alone=found["train/loss"], grad_alone=found["train/grad_norm"])
