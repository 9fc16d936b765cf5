"""Rules of the user: when they act, and which are refused."""

import math

import pytest

from trainer.config import ConfigError, GuardRule
from trainer.detection import Detector, StepAnomaly, require_usable_rules

KEY = "data/pad_frac"
STEP = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/total_valid_token_count": 10.0}


def acted(rule: GuardRule, series: list[float]) -> list[int]:
    """The steps at which a rule acts over a series of its metric."""
    detector = Detector(rules=[rule])
    return [
        step
        for step, value in enumerate(series)
        if detector.observe(step, STEP | {rule.metric: value})
    ]


def test_a_rule_that_holds_says_its_metric_value_onset_and_action() -> None:
    rule = GuardRule(KEY, above=0.3, num_steps=2, action="rollback")
    detector = Detector(rules=[rule])
    assert detector.observe(2799, STEP | {KEY: 0.5}) == ()
    assert detector.observe(2800, STEP | {KEY: 0.875}) == (
        StepAnomaly(
            step=2800,
            level="rule",
            signal=KEY,
            message=f"rule '{rule.text}': {KEY} is 0.875",
            value=0.875,
            onset=2799,
            action="rollback",
        ),
    )


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        (GuardRule(KEY, above=1.0), 1.5, True),
        (GuardRule(KEY, above=1.0), 1.0, False),
        (GuardRule(KEY, above=-2.0), -1.0, True),
        (GuardRule(KEY, above=0.0), math.inf, True),
        (GuardRule(KEY, below=1.0), 0.5, True),
        (GuardRule(KEY, below=1.0), 1.0, False),
        (GuardRule(KEY, above=1.0), math.nan, False),
        (GuardRule(KEY, below=1.0), math.nan, False),
    ],
)
def test_a_limit_must_be_exceeded(rule: GuardRule, value: float, holds: bool) -> None:
    assert acted(rule, [value]) == ([0] if holds else [])


def test_a_rule_on_a_metric_that_a_step_lacks_does_not_hold() -> None:
    detector = Detector(rules=[GuardRule(KEY, below=1.0, num_steps=2)])
    values = [STEP | {KEY: 0.0}, STEP, STEP | {KEY: 0.0}, STEP | {KEY: 0.0}]
    assert [len(detector.observe(step, row)) for step, row in enumerate(values)] == [0, 0, 0, 1]


def test_for_counts_consecutive_steps() -> None:
    series = [5.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert acted(GuardRule(KEY, above=3, num_steps=3), series) == [5]
    assert acted(GuardRule(KEY, above=3), series) == [0]


def test_a_rule_that_has_acted_rests_for_50_steps() -> None:
    assert acted(GuardRule(KEY, above=3, action="rollback"), [5.0] * 120) == [0, 51, 102]


def test_two_rules_on_one_metric_act_separately() -> None:
    detector = Detector(rules=[GuardRule(KEY, above=3), GuardRule(KEY, above=4, action="stop")])
    actions = [
        [found.action for found in detector.observe(step, STEP | {KEY: value})]
        for step, value in ((0, 3.5), (1, 5.0))
    ]
    assert actions == [["warn"], ["stop"]]


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (GuardRule("train/gradnorm", above=3), "did you mean 'train/grad_norm'"),
        (GuardRule("kl", above=10, action="rollback"), "train/loss"),
        (GuardRule("val/loss", above=3), "does not see"),
        (GuardRule("train/time(s)", above=3), "does not see"),
        (GuardRule("guard/loss_z", above=3), "does not see"),
        (GuardRule("train/loss"), "'above' or 'below'"),
        (GuardRule("train/loss", above=1, below=2), "'above' or 'below'"),
        (GuardRule("train/loss", below=1, action="skip"), "skip"),
        (GuardRule("train/loss", above=1, num_steps=2, action="skip"), "skip"),
        (GuardRule(KEY, above=1, action="skip"), "skip"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_evaluated_or_carried_out_is_refused(
    rule: GuardRule, hint: str
) -> None:
    require_usable_rules(
        [GuardRule("train/loss", above=1, action="skip"), GuardRule(KEY, below=1, num_steps=2)]
    )
    with pytest.raises(ConfigError) as refused:
        require_usable_rules([GuardRule("train/loss", above=1), rule])
    assert "trainer.guard.rules[1]" in str(refused.value) and hint in str(refused.value)


def test_after_a_restart_a_changed_rule_counts_from_zero_and_the_others_go_on() -> None:
    old = Detector(
        rules=[GuardRule(KEY, above=3, num_steps=2), GuardRule(KEY, above=1, num_steps=2)]
    )
    old.observe(0, STEP | {KEY: 5.0})
    new = Detector(
        rules=[GuardRule(KEY, above=4, num_steps=2), GuardRule(KEY, above=1, num_steps=2)]
    )
    new.load_state_dict(old.state_dict())
    (event,) = new.observe(1, STEP | {KEY: 5.0})
    assert event.onset == 0
