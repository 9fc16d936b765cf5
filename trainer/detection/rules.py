"""Rules that users write about metrics: `kl > 10 or completions/clipped_ratio > 0.3 for 3: snapshot, rollback`.

    rule      = condition ["for" STEPS] ":" action {"," action}
    condition = comparisons of metrics and numbers, joined by "and", "or" and parentheses

A metric stands bare (`train/time(s)`, `loss@p99`) or, with blanks or other signs in its name, in quotes. `for` counts
steps in a row in which the whole condition holds. Python's parser reads conditions; nothing of them is executed.
"""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from trainer import metrics
from trainer.config import ConfigError, did_you_mean
from trainer.detection.anomaly import GRAD_NORM, LOSS, Level, StepAnomaly
from trainer.detection.steps import StepLimits
from trainer.progress import Remembered

ACTIONS = ("warn", "snapshot", "skip", "rollback", "stop")
COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
REST_STEPS = 50
_NAME = re.compile(r""""[^"]+"|'[^']+'|(?<![\w.])[A-Za-z_][\w./@-]*(?:[(\[][^()\[\]\s<>=!:,]*[)\]][\w./@-]*)*""")
_NUM_STEPS = re.compile(r"\sfor(?:\s+([\w.]+))?\s*$")
_FIX = (
    "write comparisons such as train/loss > 5, joined by and, or and parentheses; a metric whose name has blanks or "
    "other signs needs quotes"
)


@dataclass(frozen=True, eq=False)
class UserRule:
    """A condition on the metrics of one step, how many steps in a row it must hold, and what to do then."""

    text: str
    holds: Callable[[Mapping[str, float]], bool]
    """A metric that a step does not have makes its comparison false."""
    num_steps: int
    actions: tuple[str, ...]
    keys: tuple[str, ...]
    upper_limit: tuple[str, float] | None
    """(metric, number) of a rule that is `metric > number` at one step; None for any other."""


def parse_rules(texts: Sequence[str]) -> tuple[UserRule, ...]:
    """Raises `ConfigError` for a rule that cannot be read, or asks for what the guard cannot know or do."""
    rules = tuple(parse_rule(text) for text in texts)
    for rule in rules:  # ranks could not agree on a metric that the guard does not see
        if unknown := [key for key in rule.keys if not metrics.is_signal(key)]:
            seen = [metric.key for metric in metrics.by_group() if metrics.is_signal(metric.key)]
            hint = did_you_mean(unknown[0], seen) or f"it sees {', '.join(seen)}"
            raise _error(rule.text, f"the guard does not see '{unknown[0]}'; {hint}")
    skip_limits(rules)
    return rules


def skip_limits(rules: Iterable[UserRule]) -> StepLimits:
    """What rules with the action `skip` ask of the device, which knows nothing but loss and gradient norm.

    Raises `ConfigError` for such a rule that is more than `train/loss > x` or `train/grad_norm > x`.
    """
    found = {LOSS: inf, GRAD_NORM: inf}
    for rule in rules:
        if "skip" in rule.actions:
            key, limit = rule.upper_limit or ("", inf)
            if key not in found:
                raise _error(
                    rule.text,
                    "an update is left out before its other metrics are known; skip goes with 'train/loss > number' or "
                    "'train/grad_norm > number' alone",
                )
            found[key] = min(found[key], limit)
    return StepLimits(loss_alone=found[LOSS], grad_alone=found[GRAD_NORM])


def parse_rule(text: str) -> UserRule:
    """Raises `ConfigError` that quotes the rule and says the column and what to write."""
    text = text.strip()
    condition, colon, named = text.rpartition(":")
    if not colon:
        raise _error(text, "write ':' and the actions after the condition, e.g. ': snapshot, rollback'", len(text))
    actions = tuple(action.strip() for action in named.split(","))
    if not set(ACTIONS).issuperset(actions) or len(set(actions)) < len(actions):
        fix = f"write one or more of {', '.join(ACTIONS)}, separated by commas, each once"
        raise _error(text, fix, len(condition) + 1)
    num_steps = 1
    if lasting := _NUM_STEPS.search(condition):
        if not (lasting[1] or "").isdigit() or int(lasting[1]) < 1:
            raise _error(text, "write a whole number of steps, at least 1, after 'for'", lasting.start() + 4)
        condition, num_steps = condition[: lasting.start()], int(lasting[1])
    read = _Condition(text, condition)
    keys = tuple(dict.fromkeys(read.names.values()))
    return UserRule(text, read.holds, num_steps, actions, keys, read.upper_limit if num_steps == 1 else None)


class _Condition:
    """`holds` says whether it does in a row of metrics; `names` are the metrics in it, by their columns."""

    def __init__(self, rule: str, text: str) -> None:
        self._rule, self.names = rule, dict[int, str]()
        plain = _NAME.sub(self._without_name, text)
        try:
            with warnings.catch_warnings(action="error"):  # of a number that runs into a word
                tree = ast.parse(plain.replace("#", "?"), mode="eval").body  # no comments
        except (SyntaxError, ValueError) as error:
            raise _error(rule, _FIX, (getattr(error, "offset", 0) or len(text) + 1) - 1) from None
        self.holds = self._meaning(tree)
        self.upper_limit: tuple[str, float] | None = None
        if isinstance(tree, ast.Compare) and isinstance(tree.ops[0], ast.Gt):
            left, right = self._operand(tree.left), self._operand(tree.comparators[0])
            self.upper_limit = (left, right) if isinstance(left, str) and isinstance(right, float) else None

    def _without_name(self, match: re.Match[str]) -> str:
        """A name of Python's in the same columns."""
        if match[0] in ("and", "or"):
            return match[0]
        self.names[match.start()] = match[0].strip("\"'")
        return "_" * len(match[0])

    def _meaning(self, node: ast.expr) -> Callable[[Mapping[str, float]], bool]:
        match node:
            case ast.BoolOp(op=op, values=values):
                terms, join = [self._meaning(term) for term in values], all if isinstance(op, ast.And) else any
                return lambda row: join(term(row) for term in terms)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                compare, sides = COMPARISONS[type(op)], (self._operand(left), self._operand(right))
                if any(isinstance(side, str) for side in sides):

                    def holds(row: Mapping[str, float]) -> bool:
                        first, second = (row.get(side) if isinstance(side, str) else side for side in sides)
                        return first is not None and second is not None and compare(first, second)

                    return holds
        raise _error(self._rule, _FIX, node.col_offset)

    def _operand(self, node: ast.expr) -> str | float:
        if isinstance(node, ast.Name) and node.col_offset in self.names:
            return self.names[node.col_offset]
        with suppress(ValueError, TypeError):
            if type(number := ast.literal_eval(node)) in (int, float):
                return float(number)
        raise _error(self._rule, _FIX, node.col_offset)


def _error(rule: str, fix: str, column: int | None = None) -> ConfigError:
    place = "" if column is None else f", column {column + 1}"
    return ConfigError(f"'trainer.guard.rules': rule {rule!r}{place}: {fix}")


class RuleWatch(Remembered):
    """Which rules act at a step. After it has acted a rule rests for `REST_STEPS`, except for `skip`: that is about the
    step itself and is said as long as the rule holds. A rule that was written since a checkpoint starts anew.
    """

    KEPT: ClassVar = ("_num_in_a_row", "_resting")

    def __init__(self, rules: Iterable[UserRule]) -> None:
        self._rules = {rule.text: rule for rule in rules}
        self._num_in_a_row = dict.fromkeys(self._rules, 0)
        self._resting = dict.fromkeys(self._rules, 0)

    def observe(self, step: int, values: Mapping[str, float]) -> Iterator[StepAnomaly]:
        for text, rule in self._rules.items():
            is_resting = self._resting[text] > 0
            self._resting[text] -= is_resting
            self._num_in_a_row[text] = count = self._num_in_a_row[text] + 1 if rule.holds(values) else 0
            if count < rule.num_steps:
                continue
            actions = tuple(action for action in rule.actions if action == "skip" or not is_resting)
            if not is_resting:
                self._resting[text] = REST_STEPS
            if actions:
                found = ", ".join(f"{key} is {values[key]:.4g}" for key in rule.keys if key in values)
                lasting = f" for {count} steps" if rule.num_steps > 1 else ""
                message, onset = f"rule '{text}' holds{lasting}: {found}", max(0, step - count + 1)
                value = values.get(rule.keys[0])
                yield StepAnomaly(step, Level.RULE, text, message, value=value, onset=onset, actions=actions)
