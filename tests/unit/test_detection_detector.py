"""What a detector says over a run: lasting trouble once, warnings rationed, the same after a
restart.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
from curves import HELD_OUT, TUNED, Curve, decaying, drift, healthy, level, spike
from guard_trials import watch

from trainer.config import GuardRule
from trainer.detection import Detector, Level, StepAnomaly
from trainer.detection.watches import Divergence, WarnLedger

FAMILIES = [*TUNED[::2], *HELD_OUT[::2]]


def constant(num_steps: int, *, loss: float = 2.0, grad_norm: float = 1.0) -> Curve:
    return Curve(np.full(num_steps, loss), np.full(num_steps, grad_norm))


def told(events: list[StepAnomaly]) -> list[tuple[int, str]]:
    return [(event.step, event.level.value) for event in events]


@pytest.mark.covers("S3.39")
def test_a_run_that_starts_above_5_is_warned_about_once() -> None:
    (event,) = watch(constant(60, loss=5.1))
    assert (event.level, event.step, event.signal) == (Level.WARN, 0, "train/loss")
    assert "starts at 5.1" in event.message
    assert watch(constant(60, loss=4.9)) == []


def test_a_loss_above_5_is_no_news_once_steps_can_be_judged() -> None:
    curve = constant(200, loss=4.9)
    curve.loss[40:] = 5.2
    assert watch(curve) == []


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)]
)
def test_what_is_no_number_is_told_at_every_step_and_spoils_nothing(
    loss: float, grad_norm: float
) -> None:
    curve = constant(100)
    for step in (3, 50, 51):  # during warm-up too
        curve.loss[step], curve.grad_norm[step] = loss, grad_norm
    detector, untouched = Detector(), Detector()
    events = watch(curve, detector=detector)
    assert told(events) == [(3, "nonfinite"), (50, "nonfinite"), (51, "nonfinite")]
    watch(constant(97), detector=untouched)
    assert detector.limits() == untouched.limits()
    assert all(math.isfinite(score) for score in detector.scores.values())


@pytest.mark.parametrize(
    ("faulty", "signal"),
    [
        ({"loss": 0.0}, "train/loss"),
        ({"grad_norm": 0.0}, "train/grad_norm"),
        ({"grad_norm": 9e-7}, "train/grad_norm"),
    ],
)
@pytest.mark.covers("S1.12")
def test_a_run_that_learns_nothing_is_dead_after_ten_steps(
    faulty: dict[str, float], signal: str
) -> None:
    detector = Detector()
    (event,) = watch(constant(40, **faulty), detector=detector)
    assert (event.level, event.signal, event.step, event.onset) == (Level.DEAD, signal, 9, 0)
    assert detector.scores["guard/level"] == 4.0, "as long as it lasts"
    watch(constant(1), detector=detector)
    assert told(watch(constant(10, **faulty), detector=detector)) == [(9, "dead")], (
        "a live step in between"
    )
    assert watch(constant(40, loss=1e-5, grad_norm=1e-5)) == []


def test_batches_without_label_tokens_are_told_at_once_and_dead_after_ten() -> None:
    detector, events = Detector(), []
    for step in range(60):
        values = constant(60).values(step)
        if step >= 40:
            values |= {
                "train/total_valid_token_count": 0.0,
                "train/loss": 0.0,
                "train/grad_norm": 0.0,
            }
        events += detector.observe(step, values)
    assert told(events) == [(40, "warn"), (49, "dead")]
    assert {event.signal for event in events} == {"train/total_valid_token_count"}
    assert detector.limits().loss_with_grad == pytest.approx(4.0), (
        "an empty batch says nothing about the usual loss"
    )


@pytest.mark.covers("S1.14")
def test_a_loss_that_keeps_rising_is_told_once_per_episode() -> None:
    curve = constant(1200)
    for start in (300, 800):
        curve.loss[start : start + 200] = 2.6
    events = [event for event in watch(curve) if event.level is Level.DIVERGING]
    assert [300 + 47 <= event.step <= 300 + 52 for event in events] == [True, False]
    assert 847 <= events[1].step <= 852 and len(events) == 2
    assert [
        abs(event.onset - start) <= 2 for event, start in zip(events, (300, 800), strict=True)
    ] == [True, True]
    assert (events[0].value, events[0].centre) == (2.6, 2.0) and events[0].ratio == pytest.approx(
        1.3
    )


def test_a_run_that_diverges_shows_it_in_every_step() -> None:
    curve = constant(600)
    curve.loss[300:] = 2.6
    detector = Detector()
    watch(curve, detector=detector)
    assert detector.scores["guard/level"] == 3.0


def test_a_small_loss_that_doubles_does_not_diverge() -> None:
    curve = constant(600, loss=0.05)
    curve.loss[300:] = 0.14
    assert watch(curve) == [], "less than 0.1 nat"


def test_a_signed_loss_diverges_by_distance() -> None:
    """A quarter of the best level's size, which is -1."""
    for rise, expected in ((0.5, [pytest.approx(248, abs=3)]), (0.2, [])):
        watched, curve = Divergence(), np.random.default_rng(0).normal(-1.0, 0.02, 400)
        curve[200:] += rise
        assert [
            step for step, loss in enumerate(curve.tolist()) if watched.observe(step, loss)
        ] == expected


def test_warnings_are_at_least_50_steps_apart() -> None:
    curve = constant(500)
    curve.grad_norm[100:400:10] = 10.0
    steps = [event.step for event in watch(curve) if event.level is Level.WARN]
    assert len(steps) >= 2 and min(np.diff(steps)) >= 50


def test_a_heavy_tail_is_told_once_and_then_kept_quiet() -> None:
    curve = constant(3000)
    curve.grad_norm[60::40] = 10.0
    detector = Detector()
    events = watch(curve, detector=detector)
    advisories = [event for event in events if event.level is Level.ADVISORY]
    assert len(advisories) == 1 and "look at the samples" in advisories[0].message
    assert not [event for event in events if event.step > advisories[0].step]
    assert detector.scores["guard/spike_rate"] == 25.0, "of the last 1000 steps"
    assert advisories[0].step == 60 + 10 * 40 + 1, (
        "the eleventh, once the step after it was ordinary"
    )


def test_a_restored_ledger_counts_alike() -> None:
    straight, restored = WarnLedger(), WarnLedger()
    num_advisories = 0
    for step, is_spike in enumerate((np.random.default_rng(6).random(1500) < 0.02).tolist()):
        state = json.loads(json.dumps(restored.state_dict()))
        restored = WarnLedger()
        restored.load_state_dict(state)
        advisory = straight.count(step, is_spike=is_spike)
        assert restored.count(step, is_spike=is_spike) == advisory, f"seed 6, step {step}"
        assert not is_spike or restored.may_warn() == straight.may_warn(), f"seed 6, step {step}"
        num_advisories += advisory is not None
    assert num_advisories == 1


def test_a_heavy_tail_hides_no_severe_step() -> None:
    curve = constant(3000)
    curve.grad_norm[60::40] = 10.0
    assert (2222, "severe") in told(watch(spike(curve, at=2222, loss=3, grad=27)))


def test_scores_are_those_of_the_last_step() -> None:
    detector = Detector()
    assert detector.scores == {
        "guard/loss_z": 0.0,
        "guard/grad_z": 0.0,
        "guard/level": 0.0,
        "guard/spike_rate": 0.0,
    }
    watch(spike(constant(200), at=199, loss=2.0, grad=math.exp(0.5)), detector=detector)
    assert detector.scores["guard/loss_z"] == pytest.approx(math.log(2) / 0.05)
    assert detector.scores["guard/grad_z"] == pytest.approx(5.0)
    assert (detector.scores["guard/level"], detector.scores["guard/spike_rate"]) == (1.0, 5.0)
    watch(constant(1), detector=detector)
    assert detector.scores["guard/level"] == 0.0


def test_a_rationed_warning_still_shows_in_the_level() -> None:
    curve = spike(spike(constant(121), at=100, grad=10), at=120, grad=10)
    detector = Detector()
    assert told(watch(curve, detector=detector)) == [(100, "warn")]
    assert detector.scores["guard/level"] == 1.0


@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_a_detector_restored_at_every_step_decides_alike(family: tuple[str, str]) -> None:
    """The state goes through JSON; faults of all kinds, a step that is no number and rules are
    under way.
    """
    rules = [
        GuardRule("kl", above=3, num_steps=2, action="rollback"),
        GuardRule("train/grad_norm", above=8, action="warn"),
    ]
    curve = healthy(family, seed=5, num_steps=500)
    curve = decaying(
        spike(level(drift(curve, at=400, rate=0.02), at=200), at=90, loss=3, grad=27), at=300
    )
    curve.loss[150] = math.nan
    curve.loss[250:262] = 0.0
    straight, restored = Detector(rules=rules), Detector(rules=rules)
    num_events = 0
    for step in range(500):
        state: dict[str, Any] = json.loads(json.dumps(restored.state_dict(), allow_nan=False))
        restored = Detector(rules=rules)
        restored.load_state_dict(state)
        values = curve.values(step) | {"kl": float(step % 7)}
        assert restored.limits() == straight.limits()
        events = straight.observe(step, values)
        # as text: two events whose value is NaN are alike
        assert str(restored.observe(step, values)) == str(events), f"{family}, seed 5, step {step}"
        assert restored.scores == straight.scores
        num_events += len(events)
    assert num_events > 15


def test_an_event_becomes_a_line_of_json_without_unknown_numbers() -> None:
    (event,) = watch(spike(constant(101), at=100, grad=10))
    row = json.loads(json.dumps(event.as_dict(), allow_nan=False))
    assert (row["level"], row["signal"], row["step"]) == ("warn", "train/grad_norm", 100)
    assert "action" not in row
