"""What is done about an abnormal step or validation."""

import math
from typing import Any

import pytest
from toy import guard_config

from trainer.config import GuardRule
from trainer.train.detection import StepLimits
from trainer.train.guard import Decision, Guard

INF, NAN = math.inf, math.nan


class Events:
    def __init__(self) -> None:
        self.found: list[tuple[int, str, str]] = []

    def event(self, kind: str, step: int, message: str, level: str) -> None:
        self.found.append((step, kind, level))

    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.found]


def signals(loss: float = 2.0, grad_norm: float = 1.0, **others: float) -> dict[str, float]:
    return {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/total_valid_token_count": 100,
        **others,
    }


def calm(guard: Guard, num_steps: int, *, first: int = 1) -> int:
    """Ordinary steps, a little noise; the next step."""
    for step in range(first, first + num_steps):
        wave = 1 + 0.02 * math.sin(step)
        assert guard.observe(step, signals(2.0 * wave, wave), is_skipped=False) == Decision()
    return first + num_steps


def new_guard(events: Events | None = None, **changes: Any) -> Guard:
    return Guard(guard_config(**changes), tell=None if events is None else events.event)


@pytest.mark.parametrize(("loss", "grad_norm"), [(NAN, 1.0), (1.0, -INF)])
def test_guard_counts_what_is_not_finite(loss, grad_norm):
    guard = new_guard()
    guard.observe(1, signals(1e3, 0.1), is_skipped=False)
    assert not guard.observe(2, signals(loss, grad_norm), is_skipped=True).is_stop
    assert guard.scores()["optim/skipped_steps"] == 1


def test_guard_gives_up_only_after_steps_in_a_row():
    guard = new_guard()
    for step, loss in enumerate((NAN, NAN, NAN, NAN, 1.0, NAN, 2.0), start=1):
        assert not guard.observe(step, signals(loss), is_skipped=math.isnan(loss)).is_stop
    for step in range(8, 12):
        assert not guard.observe(step, signals(NAN), is_skipped=True).is_stop
    decision = guard.observe(12, signals(NAN), is_skipped=True)
    assert decision.is_stop and "since step 8" in decision.reason and guard.num_skipped == 10


def test_guard_gives_up_after_ten_bad_steps_in_two_hundred():
    guard, rarer = new_guard(), new_guard()
    assert [n for n in range(1, 201) if nan_every(20, n, guard).is_stop] == [200]
    assert not any(nan_every(25, n, rarer).is_stop for n in range(1, 500))


def nan_every(period: int, step: int, guard: Guard) -> Decision:
    is_bad = step % period == 0
    return guard.observe(step, signals(NAN if is_bad else 2.0), is_skipped=is_bad)


def test_guard_survives_a_restart():
    guard = new_guard()
    for step, loss in enumerate((NAN, 1.0, NAN, NAN, NAN, NAN), start=1):
        guard.observe(step, signals(loss), is_skipped=math.isnan(loss))
    resumed = new_guard(on_diverging="rollback")
    resumed.load_state_dict(guard.state_dict())
    assert resumed.num_skipped == 5
    decision = resumed.observe(7, signals(NAN), is_skipped=True)
    assert decision.rollback_onset == 3 and decision.is_stop, "the steps before the restart count"


SEVERE = signals(8.0, 20.0)


@pytest.mark.covers("S2.36", "S2.41")
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("warn", {"wants_evidence": True}),
        ("skip", {"wants_evidence": True}),
        ("rollback", {"wants_evidence": True, "rollback_onset": 61}),
        ("stop", {"wants_evidence": True, "is_stop": True}),
    ],
)
def test_a_severe_step_is_answered_as_configured(action, expected):
    events = Events()
    guard = new_guard(events, on_severe=action)
    step = calm(guard, 60)
    assert (guard.limits().loss_with_grad < 8.0) == (action == "skip")
    decision = guard.observe(step, SEVERE, is_skipped=action == "skip")
    assert decision == Decision(**expected, reason=decision.reason)
    assert "train/loss is 8" in decision.reason
    assert set(events.kinds()) == {"guard/severe"} | ({"skip"} if action == "skip" else set())
    assert guard.episodes == [(61, 61)]


def test_evidence_is_kept_once_in_five_hundred_steps():
    guard = new_guard()
    step = calm(guard, 60)
    assert guard.observe(step, SEVERE, is_skipped=False).wants_evidence
    step = calm(guard, 60, first=step + 1)
    assert not guard.observe(step, SEVERE, is_skipped=False).wants_evidence
    step = calm(guard, 450, first=step + 1)
    assert guard.observe(step, SEVERE, is_skipped=False).wants_evidence


def test_the_fourth_rollback_stops_the_run():
    guard = new_guard(on_severe="rollback")
    step = calm(guard, 60)
    guard.note_rollbacks(Rolled(3))
    decision = guard.observe(step, SEVERE, is_skipped=False)
    assert decision.is_stop and decision.rollback_onset is None and "3 times" in decision.reason
    assert guard.lr_factor == 0.5 and guard.scores()["data/skipped_batches"] == 17


class Rolled:
    def __init__(self, count: int) -> None:
        self.entries = (None,) * count
        self.skipped_steps = frozenset(range(17))
        self.lr_factor = 0.5


@pytest.mark.covers("S2.41:C")
def test_a_rule_asks_for_its_action_and_keeps_evidence_unless_it_only_warns():
    rules = [
        GuardRule("train/grad_norm", above=10, num_steps=2, action="rollback"),
        GuardRule("data/pad_frac", above=0.5, action="stop"),
        GuardRule("train/loss", below=1),
    ]
    events = Events()
    guard = new_guard(events, rules=rules)
    assert guard.observe(1, signals(grad_norm=11.0), is_skipped=False) == Decision()
    decision = guard.observe(2, signals(grad_norm=11.0), is_skipped=False)
    assert decision.wants_evidence and decision.rollback_onset == 1 and not decision.is_stop
    assert events.kinds() == ["guard/rule"]
    decision = guard.observe(3, signals(0.5), is_skipped=False)
    assert not decision.wants_evidence and decision.rollback_onset is None and not decision.is_stop
    assert events.kinds() == ["guard/rule", "guard/rule"]
    assert guard.observe(4, signals(**{"data/pad_frac": 0.9}), is_skipped=False).is_stop


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


@pytest.mark.covers("S1.14:C", "S1.34:C", "S3.35:C")
@pytest.mark.parametrize("action", ["warn", "rollback", "stop"])
def test_a_loss_that_keeps_rising_is_answered_as_configured(action):
    guard = new_guard(on_diverging=action)
    step, decision = calm(guard, 200), Decision()
    onset = step
    while decision == Decision() and step < onset + 200:
        decision = guard.observe(step, signals(2.0 * 1.005 ** (step - onset)), is_skipped=False)
        step += 1
    assert decision.wants_evidence and decision.is_stop == (action == "stop")
    assert (decision.rollback_onset is not None) == (action == "rollback")
    assert abs((decision.rollback_onset or onset) - onset) < 70


@pytest.mark.covers("S3.32", "S3.41:C", "S3.51:C")
def test_overfitting_is_told_with_its_best_step_and_only_early_stopping_ends_the_run():
    events = Events()
    guard, stopping = new_guard(events), new_guard(early_stop_patience=2)
    curve = [(500, 1.2, 1.5), (1000, 0.8, 1.3), (1500, 0.5, 1.4), (2000, 0.3, 1.6)]
    decisions = [
        guard.observe_validation(step, val, train_loss=train) for step, train, val in curve
    ]
    stops = [
        stopping.observe_validation(step, val, train_loss=train).is_stop
        for step, train, val in curve
    ]
    assert decisions == [Decision()] * 4 and stops == [False, False, False, True]
    assert events.found == [(2000, "overfit", "warn")] and guard.best_step == 1000
    assert guard.validation_scores() == {"val/best_loss": 1.3, "val/best_step": 1000}


def test_a_rollback_forgets_the_window_and_keeps_the_counts():
    guard = new_guard(on_severe="rollback")
    saved = guard.state_dict()
    step = calm(guard, 60)
    guard.observe(step, SEVERE, is_skipped=True)
    before = guard.state_dict()
    guard.load_state_dict(saved)

    class Entry:
        found_step, target_step, first_skipped, last_skipped, reason = 61, 40, 53, 69, "a reason"

    rolled = Rolled(1)
    rolled.entries = (Entry,)  # type: ignore[assignment]
    guard.after_rollback(before, rolled)
    assert (guard.num_skipped, guard.num_decisions, guard.episodes) == (1, 1, [(61, 61)])
    assert guard.scores()["guard/loss_z"] != 0, "scores are those of the last step"
    assert guard.limits() == StepLimits(), "the window is that of the checkpoint: empty"


def test_a_rollback_forgets_steps_that_were_not_finite_after_its_checkpoint():
    """Five before the checkpoint and five after it are not ten that the run still stands behind."""
    guard = new_guard()
    for step in range(1, 11):
        guard.observe(step, signals(NAN if step % 2 else 2.0), is_skipped=bool(step % 2))
    saved = guard.state_dict()
    for step in range(11, 20):
        guard.observe(step, signals(NAN if step % 2 else 2.0), is_skipped=bool(step % 2))
    guard.load_state_dict(saved)
    assert guard.state_dict()["nonfinite_steps"] == [1, 3, 5, 7, 9]
