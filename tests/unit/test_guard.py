"""Tests of the guard's reactions to abnormal steps and validations."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from toy import guard_config

from trainer.config import GuardRule
from trainer.train.detection import StepLimits
from trainer.train.guard import Guard
from trainer.train.parts import Decision


def signals(loss=2.0, grad_norm=1.0, **others):
    usual = {"train/loss": loss, "train/grad_norm": grad_norm, "train/total_valid_token_count": 100}
    return usual | others


SEVERE = signals(8.0, 20.0)


def new_guard(*, tell=None, **changes):
    return Guard(guard_config(**changes), tell=tell)


def calm(guard, num_steps, *, first=1):
    """Make ordinary steps with a little noise; return the next step."""
    for step in range(first, first + num_steps):
        wave = 1 + 0.02 * math.sin(step)
        assert guard.observe(step, signals(2.0 * wave, wave), is_skipped=False) == Decision()
    return first + num_steps


def stops(guard, bad_steps, num_steps, *, first=1):
    """Return the decisions to stop or roll back, with a loss of NaN at `bad_steps`."""
    found = []
    for step in range(first, num_steps + 1):
        is_bad = step in bad_steps
        decision = guard.observe(step, signals(math.nan if is_bad else 2.0), is_skipped=is_bad)
        if decision != Decision():
            found.append(decision)
    return found


@pytest.mark.parametrize(
    ("bad_steps", "num_steps", "since"),
    [
        ({1, 2, 3, 4, 6, 8, 9, 10, 11, 12}, 12, 8),
        (set(range(20, 201, 20)), 200, 20),  # ten in two hundred
        (set(range(25, 501, 25)), 500, None),
    ],
)
def test_the_guard_gives_up_after_too_many_nonfinite_steps(bad_steps, num_steps, since):
    guard = new_guard()
    found = stops(guard, bad_steps, num_steps)
    assert [(decision.is_stop, decision.rollback_onset) for decision in found] == (
        [] if since is None else [(True, None)]
    )
    assert since is None or f"since step {since}" in found[0].reason
    assert guard.scores()["optim/skipped_steps"] == len(bad_steps)


def test_the_guard_survives_a_restart():
    guard = new_guard()
    assert stops(guard, {1, 3, 4, 5, 6}, 6) == []
    resumed = new_guard(on_diverging="rollback")
    resumed.load_state_dict(guard.state_dict())
    (decision,) = stops(resumed, {7}, 7, first=7)
    assert resumed.num_skipped == 6
    assert decision.rollback_onset == 3 and decision.is_stop, "the steps before the restart count"


@pytest.mark.covers("S2.36 S2.41")
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("warn", {}),
        ("skip", {}),
        ("rollback", {"rollback_onset": 61}),
        ("stop", {"is_stop": True}),
    ],
)
def test_a_severe_step_is_answered_as_configured(action, expected):
    guard = new_guard(on_severe=action)
    step = calm(guard, 60)
    assert (guard.limits().loss_with_grad < 8.0) == (action == "skip")
    decision = guard.observe(step, SEVERE, is_skipped=action == "skip")
    assert decision == Decision(**expected, reason=decision.reason)
    assert "train/loss is 8" in decision.reason


def rollbacks(count):
    entry = SimpleNamespace(
        found_step=61, target_step=40, first_skipped=53, last_skipped=69, reason="a reason"
    )
    return SimpleNamespace(entries=(entry,) * count, skipped_steps=frozenset(range(17)))


def test_the_fourth_rollback_stops_the_run():
    guard = new_guard(on_severe="rollback")
    step = calm(guard, 60)
    guard.rollbacks = rollbacks(3)
    decision = guard.observe(step, SEVERE, is_skipped=False)
    assert decision.is_stop and decision.rollback_onset is None and "3 times" in decision.reason
    assert guard.scores()["data/skipped_batches"] == 17


def test_a_rollback_forgets_the_window_and_keeps_the_counts():
    guard = new_guard(on_severe="rollback")
    assert stops(guard, {1, 3, 5, 7}, 8) == []
    saved = guard.state_dict()
    assert stops(guard, {9, 11}, 12, first=9) == []
    step = calm(guard, 60, first=13)
    guard.observe(step, SEVERE, is_skipped=True)
    before = guard.state_dict()
    guard.load_state_dict(saved)
    guard.after_rollback(before, rollbacks(1))
    assert (guard.num_skipped, guard.num_decisions, guard.episodes) == (7, 1, [(step, step)])
    assert guard.state_dict()["nonfinite_steps"] == [1, 3, 5, 7], "those after it no longer count"


@pytest.mark.covers("S2.41:C")
def test_a_rule_asks_for_its_action():
    rules = [
        GuardRule("train/grad_norm", above=10, num_steps=2, action="rollback"),
        GuardRule("data/pad_frac", above=0.5, action="stop"),
        GuardRule("train/loss", below=1),
    ]
    tell = Mock()
    guard = new_guard(tell=tell, rules=rules)
    steps = (signals(2, 11.0), signals(2, 11.0), signals(0.5), signals(**{"data/pad_frac": 0.9}))
    first, second, third, fourth = (
        guard.observe(step, values, is_skipped=False) for step, values in enumerate(steps, 1)
    )
    assert first == third == Decision()
    assert second.rollback_onset == 1 and not second.is_stop
    assert fourth.is_stop
    assert [event.args[:2] for event in tell.mock_calls] == [
        ("guard/rule", step) for step in (2, 3, 4)
    ]


@pytest.mark.covers("S2.38")
def test_a_rule_can_skip_updates_before_they_are_made():
    rules = [
        GuardRule("train/grad_norm", above=0.5, action="skip"),
        GuardRule("train/loss", above=9, action="skip"),
    ]
    assert new_guard(rules=rules).limits() == StepLimits(loss_alone=9, grad_alone=0.5)


@pytest.mark.covers("S1.12:C")
def test_a_run_that_learns_nothing_from_the_start_is_stopped():
    guard = new_guard()
    decisions = [guard.observe(step, signals(0.0, 0.0), is_skipped=False) for step in range(1, 11)]
    assert [decision.is_stop for decision in decisions] == [False] * 9 + [True]


@pytest.mark.covers("S1.14:C S1.34:C S3.35:C")
@pytest.mark.parametrize("action", ["warn", "rollback", "stop"])
def test_a_loss_that_keeps_rising_is_answered_as_configured(action):
    guard = new_guard(on_diverging=action)
    step = calm(guard, 200)
    decision = Decision()
    onset = step
    while decision == Decision() and step < onset + 200:
        decision = guard.observe(step, signals(2.0 * 1.005 ** (step - onset)), is_skipped=False)
        step += 1
    assert decision.is_stop == (action == "stop")
    assert (decision.rollback_onset is not None) == (action == "rollback")


@pytest.mark.covers("S3.32 S3.41:C S3.51:C")
@pytest.mark.parametrize(("patience", "expected"), [(None, [0, 0, 0, 0]), (2, [0, 0, 0, 1])])
def test_overfitting_is_reported_and_only_early_stopping_ends_the_run(patience, expected):
    tell = Mock()
    guard = new_guard(tell=tell, early_stop_patience=patience)
    curve = [(500, 1.2, 1.5), (1000, 0.8, 1.3), (1500, 0.5, 1.4), (2000, 0.3, 1.6)]
    ends = [guard.observe_validation(step, val, train_loss=train) for step, train, val in curve]
    assert ends == expected
    kind, step, _, level = tell.mock_calls[0].args
    assert (kind, step, level) == ("overfit", 2000, "warn") and guard.history.best_step == 1000
    assert guard.validation_scores() == {"val/best_loss": 1.3, "val/best_step": 1000}
