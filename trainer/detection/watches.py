"""Conditions that must last for some steps: a run in which nothing is learned, and the rules of the user."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.detection.anomaly import Level, StepAnomaly
from trainer.detection.rules import UserRule

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
VALID_TOKENS = "train/total_valid_token_count"
MIN_GRAD_NORM = 1e-6
"""A gradient below it moves nothing."""
NUM_DEAD_STEPS, REST_STEPS = 10, 50


class DeadWatch:
    """Says once that nothing has been learned for `NUM_DEAD_STEPS` in a row, and again after a live step."""

    def __init__(self) -> None:
        self._num_in_a_row = {VALID_TOKENS: 0, LOSS: 0, GRAD_NORM: 0}
        self.is_dead = False

    def observe(self, step: int, values: Mapping[str, float]) -> StepAnomaly | None:
        signs = {
            VALID_TOKENS: (values[VALID_TOKENS] == 0, "no label token in any batch: check data and chat template"),
            LOSS: (values[LOSS] == 0, "the loss is exactly 0: check labels and mask"),
            GRAD_NORM: (abs(values[GRAD_NORM]) < MIN_GRAD_NORM, "the gradient vanished: check labels and weights"),
        }
        for signal, (is_dead, _) in signs.items():
            self._num_in_a_row[signal] = self._num_in_a_row[signal] + 1 if is_dead else 0
        dead = [signal for signal, count in self._num_in_a_row.items() if count >= NUM_DEAD_STEPS]
        was_dead, self.is_dead = self.is_dead, bool(dead)
        if was_dead or not dead:
            return None
        count = self._num_in_a_row[dead[0]]
        message = f"nothing learned for {count} steps: {signs[dead[0]][1]}"
        onset = max(0, step - count + 1)
        return StepAnomaly(step, Level.DEAD, dead[0], message, value=values[dead[0]], onset=onset)

    def state_dict(self) -> dict[str, Any]:
        return {"num_in_a_row": dict(self._num_in_a_row), "is_dead": int(self.is_dead)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_in_a_row = {signal: int(state_dict["num_in_a_row"][signal]) for signal in self._num_in_a_row}
        self.is_dead = bool(state_dict["is_dead"])


class RuleWatch:
    """Which rules act at a step. After it has acted a rule rests for `REST_STEPS`, except for `skip`: that is about the
    step itself and is said as long as the rule holds.
    """

    def __init__(self, rules: Iterable[UserRule]) -> None:
        self._rules = tuple(dict.fromkeys(rules))  # written twice, it counts once
        self._num_in_a_row = {rule.text: 0 for rule in self._rules}
        self._resting = {rule.text: 0 for rule in self._rules}

    def observe(self, step: int, values: Mapping[str, float]) -> Iterator[StepAnomaly]:
        for rule in self._rules:
            is_resting = self._resting[rule.text] > 0
            self._resting[rule.text] -= is_resting
            if not rule.holds(values):
                self._num_in_a_row[rule.text] = 0
                continue
            self._num_in_a_row[rule.text] += 1
            if self._num_in_a_row[rule.text] < rule.num_steps:
                continue
            actions = tuple(action for action in rule.actions if action == "skip" or not is_resting)
            if not is_resting:
                self._resting[rule.text] = REST_STEPS
            if actions:
                yield self._anomaly(step, rule, values, actions)

    def _anomaly(self, step: int, rule: UserRule, values: Mapping[str, float], actions: tuple[str, ...]) -> StepAnomaly:
        count = self._num_in_a_row[rule.text]
        found = ", ".join(f"{key} is {values[key]:.4g}" for key in rule.keys if key in values)
        lasting = f" for {count} steps" if rule.num_steps > 1 else ""
        message = f"rule '{rule.text}' holds{lasting}: {found}"
        onset = max(0, step - count + 1)
        value = values.get(rule.keys[0])
        return StepAnomaly(step, Level.RULE, rule.text, message, value=value, onset=onset, actions=actions)

    def state_dict(self) -> dict[str, Any]:
        return {"num_in_a_row": dict(self._num_in_a_row), "resting": dict(self._resting)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A rule that was written since then starts anew."""
        for mine, saved in ((self._num_in_a_row, "num_in_a_row"), (self._resting, "resting")):
            mine.update({text: int(count) for text, count in state_dict[saved].items() if text in mine})
