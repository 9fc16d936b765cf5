"""Rules of the user: what they mean, when they act, and what is said about one that cannot be read."""

import math

import pytest

from trainer.config import ConfigError
from trainer.detection import Detector, StepAnomaly, parse_rule

STEP = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/total_valid_token_count": 10.0}


def acted(rule: str, key: str, series: list[float]) -> list[tuple[int, tuple[str, ...]]]:
    """(step, actions) over a series of one metric."""
    detector = Detector(rules=[parse_rule(rule)])
    events = [event for step, value in enumerate(series) for event in detector.observe(step, STEP | {key: value})]
    return [(event.step, event.actions) for event in events]


@pytest.mark.covers("S2.41")
def test_the_rule_of_the_analysed_run() -> None:
    rule = parse_rule("kl > 10 or completions/clipped_ratio > 0.3 : snapshot, rollback")
    assert rule.keys == ("kl", "completions/clipped_ratio")
    assert rule.actions == ("snapshot", "rollback")
    assert rule.holds({"kl": 19.6, "completions/clipped_ratio": 0.0})
    assert rule.holds({"kl": 0.1, "completions/clipped_ratio": 0.31})
    assert not rule.holds({"kl": 10.0, "completions/clipped_ratio": 0.3})
    (event,) = Detector(rules=[rule]).observe(2800, STEP | {"kl": 19.6, "completions/clipped_ratio": 0.875})
    assert event == StepAnomaly(
        step=2800,
        level="rule",
        signal=rule.text,
        message=f"rule '{rule.text}' holds: kl is 19.6, completions/clipped_ratio is 0.875",
        value=19.6,
        onset=2800,
        actions=("snapshot", "rollback"),
    )


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("a > 1", True),
        ("a >= 2 and a <= 2 and a == 2", True),
        ("a != 2", False),
        ("a < 2", False),
        ("1 < a", True),
        ("a > -1e3", True),
        ("a > .5", True),
        ("b > a", True),
        ("a > b", False),
        ("a > 5 and a > 1 or b > 1", True),
        ("a > 5 and (a > 1 or b > 1)", False),
        ("b > 1 or a > 1 and a > 5", True),
        ("(b > 1 or a > 1) and a > 5", False),
        ("((a > 1))", True),
        ("a>1and b>1", None),
        ("a>1 and(b>1)", True),
    ],
)
def test_conditions_mean_what_they_say(condition: str, holds: bool | None) -> None:
    """`and` binds closer than `or`. A number and a word need a blank between them."""
    if holds is None:
        with pytest.raises(ConfigError):
            parse_rule(f"{condition}: warn")
        return
    assert parse_rule(f"{condition}: warn").holds({"a": 2.0, "b": 3.0}) == holds


@pytest.mark.parametrize(
    "name",
    [
        "train/lr(1e-3)",
        "train/time(s)",
        "memory(GiB)",
        "grad_norm@p99",
        "val/loss_by/my-source.v2",
        "actor/ppo_ratio_clipfrac",
        "for_each/and",
        "optim/lr/group[0]",
    ],
)
def test_names_of_metrics_stand_bare(name: str) -> None:
    assert parse_rule(f"{name}>0.5 and (2>{name}): warn").keys == (name,)


@pytest.mark.parametrize("name", ["loss (masked)", "a:b", "x > y", "7b/loss", "and"])
def test_any_name_may_stand_in_quotes(name: str) -> None:
    for quote in ("'", '"'):
        assert parse_rule(f"{quote}{name}{quote} > 1: warn").keys == (name,)


def test_an_absent_or_undefined_metric_makes_its_comparison_false() -> None:
    rule = parse_rule("a > 1 or b < 1 or b != 1: stop")
    assert not rule.holds({}) and not rule.holds({"a": math.nan})
    assert rule.holds({"b": 0.0})


def test_for_counts_steps_in_a_row() -> None:
    series = [5.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert acted("kl > 3 for 3: warn", "kl", series) == [(5, ("warn",))]
    assert acted("kl > 3: warn", "kl", series) == [(0, ("warn",))]


def test_a_rule_written_twice_counts_once() -> None:
    detector = Detector(rules=[parse_rule("kl > 3 for 2: warn")] * 2)
    assert [len(detector.observe(step, STEP | {"kl": 5.0})) for step in range(3)] == [0, 1, 0]


def test_a_rule_that_has_acted_rests_for_50_steps() -> None:
    assert [step for step, _ in acted("kl > 3: rollback", "kl", [5.0] * 120)] == [0, 51, 102]


def test_a_step_is_skipped_as_long_as_its_rule_holds() -> None:
    found = acted("kl > 3: skip, snapshot", "kl", [5.0, 5.0, 1.0, 5.0])
    assert found == [(0, ("skip", "snapshot")), (1, ("skip",)), (3, ("skip",))]


@pytest.mark.parametrize(
    ("text", "column", "hint"),
    [
        ("kl >> 10: stop", 1, "write comparisons"),
        ("kl > 10", 8, "write ':'"),
        ("kl > 10 stop", 13, "write ':'"),
        ("kl > 10: halt", 9, "warn, snapshot, skip, rollback, stop"),
        ("kl > 10: stop stop", 9, "separated by commas"),
        ("kl > 10: stop, stop", 9, "each once"),
        ("kl 10: stop", 4, "write comparisons"),
        ("3 > 10: stop", 1, "write comparisons"),
        ("(kl > 10: stop", 1, "parentheses"),
        ("(kl > 10 for 3): stop", 2, "write comparisons"),
        ("kl > 10 for 0: stop", 12, "whole number"),
        ("kl > 10 for 1.5: stop", 12, "whole number"),
        ("kl > 10 for: stop", 12, "whole number"),
        ("kl > 10k: stop", 7, "needs quotes"),
        ("kl * 2 > 10: stop", 1, "needs quotes"),
        ("kl > 10 or: stop", 11, "write comparisons"),
        ("'kl > 10: stop", 1, "needs quotes"),
        ("", 1, "write ':'"),
        (": stop", 1, "write comparisons"),
        ("not kl > 10: stop", 5, "write comparisons"),
        ("1 < kl < 10: stop", 1, "write comparisons"),
        ("kl > max(1, 2): stop", 6, "write comparisons"),
        ("kl > True or kl > '': stop", 19, "write comparisons"),
        ("kl > 10 # or x > 1: stop", 9, "write comparisons"),
    ],
)
def test_an_error_names_rule_column_and_fix(text: str, column: int, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(text)
    message = str(caught.value)
    assert repr(text) in message and f"column {column}" in message and hint in message, message


def test_a_rule_written_anew_starts_anew_after_a_restart() -> None:
    old = Detector(rules=[parse_rule("kl > 3 for 2: warn"), parse_rule("kl > 1 for 2: warn")])
    old.observe(0, STEP | {"kl": 5.0})
    new = Detector(rules=[parse_rule("kl > 4 for 2: warn"), parse_rule("kl > 1 for 2: warn")])
    new.load_state_dict(old.state_dict())
    assert [event.signal for event in new.observe(1, STEP | {"kl": 5.0})] == ["kl > 1 for 2: warn"]
