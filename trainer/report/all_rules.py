"""All 45 rules, in the order of their numbers."""

from trainer.report import (
    rules_completeness,
    rules_gradient,
    rules_learning,
    rules_loss,
    rules_policy,
    rules_reward,
    rules_speed,
    rules_validation,
)
from trainer.report.judge import Rule

_THEMES = (
    *(rules_loss, rules_learning, rules_gradient, rules_validation, rules_speed, rules_completeness),
    *(rules_policy, rules_reward),
)
RULES: tuple[Rule, ...] = tuple(sorted((rule for theme in _THEMES for rule in theme.RULES), key=lambda rule: rule.id))
