"""The detector: each level at its limits, lasting trouble reported once, and equal decisions after
a restart.
"""

import json
import math

import numpy as np
import pytest
import torch
from curves import HELD_OUT, LOSSES, TUNED, Curve, decaying, drift, healthy, level, spike
from guard_trials import watch

from trainer.config import ConfigError, GuardRule
from trainer.train.detection import Detector, Level, StepLimits, require_usable_rules
from trainer.train.step import is_left_out

WARM = 100
KEY = "data/pad_frac"
STEP = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/total_valid_token_count": 10.0}


def constant(num_steps, *, loss=2.0, grad_norm=1.0):
    return Curve(np.full(num_steps, loss), np.full(num_steps, grad_norm))


def told(events):
    return [(event.step, event.level.value) for event in events]


HIGH_LOSS = (3.3, 1.0)
USUAL = (2.0, 1.0)
GRAD_59 = math.exp(0.59)
GRAD_61 = math.exp(0.61)


@pytest.mark.covers("S2.9 S2.25")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(3.01, 1.0)], [(0, "warn")]),
        ([(2.99, 1.0)], []),  # z 8.04 alone is not enough
        ([(2.0, 5.1)], [(0, "warn")]),
        ([(2.0, 4.9)], []),  # z 15.9 alone is not enough
        ([(2.0, 50.5)], [(0, "severe")]),
        ([(4.1, GRAD_59)], [(0, "warn")]),
        ([(4.1, GRAD_61)], [(0, "severe")]),
        ([(3.9, GRAD_61)], [(0, "warn")]),  # not twice as high
        ([(2.0, GRAD_61), USUAL, (4.1, 1.0)], [(2, "severe")]),
        ([(2.0, GRAD_61), USUAL, USUAL, (4.1, 1.0)], [(3, "warn")]),
        ([HIGH_LOSS, USUAL, HIGH_LOSS, USUAL, HIGH_LOSS], [(0, "warn"), (4, "severe")]),
        ([HIGH_LOSS, USUAL, HIGH_LOSS, USUAL, USUAL, HIGH_LOSS], [(0, "warn")]),
    ],
)
def test_a_step_is_judged_by_loss_and_gradient(steps, expected):
    """After WARM steps of loss 2 and gradient 1, whose scales are at their floors."""
    loss, grad_norm = zip(*([USUAL] * WARM + steps), strict=True)
    events = watch(Curve(np.array(loss), np.array(grad_norm)))
    assert [(step - WARM, kind) for step, kind in told(events)] == expected
    first = next(n for n, step in enumerate(steps) if step != USUAL)
    assert all(event.onset == WARM + first for event in events if event.level == Level.SEVERE)


@pytest.mark.covers("S2.38")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_device_skips_exactly_the_steps_that_are_severe(loss):
    """Test the limits themselves, and values one float above them."""
    seed = 11
    rng = np.random.default_rng(seed)
    curve = healthy((loss, "heavy"), seed=seed, num_steps=700)
    detector = Detector()
    num_severe = 0
    assert detector.limits() == StepLimits(), "nothing is known yet"
    for step in range(700):
        limits = detector.limits()
        values = curve.values(step)
        if rng.random() < 0.2:
            values["train/loss"] *= rng.choice([1.4, 1.6, 3.0, 10.0])
            values["train/grad_norm"] *= rng.choice([1.0, 4.0, 8.0, 200.0])
        at = {"train/loss": limits.loss_with_grad, "train/grad_norm": limits.grad_with_loss}
        for key, limit in at.items():
            if limit < math.inf and rng.random() < 0.1:
                values[key] = rng.choice([limit, math.nextafter(limit, math.inf)])
        loss_and_norm = torch.tensor(list(values.values())[:2], dtype=torch.float64).unbind()
        expected = bool(is_left_out(*loss_and_norm, limits))
        found = any(event.level is Level.SEVERE for event in detector.observe(step, values))
        assert found == expected, f"seed {seed}, step {step}: {values}"
        num_severe += expected
    assert 5 < num_severe < 650


@pytest.mark.covers("S3.39")
def test_a_run_that_starts_above_5_causes_one_warning():
    assert told(watch(constant(60, loss=5.1))) == [(0, "warn")]
    curve = constant(200, loss=4.9)
    curve.loss[40:] = 5.2
    assert watch(curve) == [], "no news once steps can be judged"


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)]
)
def test_nonfinite_steps_are_reported_each_time_and_spoil_nothing(loss, grad_norm):
    curve = constant(100)
    for step in (3, 50, 51):  # during warm-up too
        curve.loss[step], curve.grad_norm[step] = loss, grad_norm
    detector = Detector()
    untouched = Detector()
    events = watch(curve, detector=detector)
    assert told(events) == [(3, "nonfinite"), (50, "nonfinite"), (51, "nonfinite")]
    watch(constant(97), detector=untouched)
    assert detector.limits() == untouched.limits()


@pytest.mark.parametrize("faulty", [{"loss": 0.0}, {"grad_norm": 0.0}, {"grad_norm": 9e-7}])
@pytest.mark.covers("S1.12")
def test_a_run_that_learns_nothing_is_dead_after_ten_steps(faulty):
    detector = Detector()
    (event,) = watch(constant(40, **faulty), detector=detector)
    assert (event.level, event.step, event.onset) == (Level.DEAD, 9, 0)
    watch(constant(1), detector=detector)
    again = watch(constant(10, **faulty), detector=detector)
    assert told(again) == [(9, "dead")], "after a live step"
    assert watch(constant(40, loss=1e-5, grad_norm=1e-5)) == []


def test_batches_without_label_tokens_are_reported_at_once_and_dead_after_ten():
    detector = Detector()
    events = []
    for step in range(60):
        events += detector.observe(step, STEP if step < 40 else dict.fromkeys(STEP, 0.0))
    assert told(events) == [(40, "warn"), (49, "dead")]
    assert detector.limits().loss_with_grad == pytest.approx(4.0), "they are not usual losses"


@pytest.mark.parametrize("family", [*TUNED[::8], HELD_OUT[0]], ids="-".join)
def test_a_detector_restored_at_every_step_decides_alike(family):
    """The state survives JSON, with faults of all kinds and active rules."""
    rules = [GuardRule("kl", above=3, num_steps=2, action="rollback")]
    rules += [GuardRule("train/grad_norm", above=8, action="warn")]
    curve = healthy(family, seed=5, num_steps=500)
    curve = drift(curve, at=400, rate=0.02)
    curve = decaying(spike(level(curve, at=200), at=90, loss=3, grad=27), at=300)
    curve.loss[150] = math.nan
    curve.loss[250:262] = 0.0
    straight = Detector(rules=rules)
    restored = Detector(rules=rules)
    num_events = 0
    for step in range(500):
        state = json.loads(json.dumps(restored.state_dict(), allow_nan=False))
        restored = Detector(rules=rules)
        restored.load_state_dict(state)
        values = curve.values(step) | {"kl": float(step % 7)}
        assert restored.limits() == straight.limits()
        events = straight.observe(step, values)
        assert restored.observe(step, values) == events, f"{family}, seed 5, step {step}"
        assert restored.scores == straight.scores
        num_events += len(events)
    assert num_events > 15


@pytest.mark.parametrize(
    ("rule", "series", "expected"),
    [
        (GuardRule(KEY, above=1.0), [1.0, 1.5], [(1, 1)]),
        (GuardRule(KEY, below=1.0), [1.0, 0.5], [(1, 1)]),
        (GuardRule(KEY, above=3, num_steps=2), [5.0, math.nan, 5.0, 5.0], [(3, 2)]),
        (GuardRule(KEY, above=3), [5.0] * 120, [(0, 0), (51, 0), (102, 0)]),
    ],
)
def test_a_rule_acts_where_its_limit_is_exceeded_for_long_enough(rule, series, expected):
    """`expected`: steps at which the rule acts, with their onsets."""
    detector = Detector(rules=[rule])
    events = []
    for step, value in enumerate(series):
        events += detector.observe(step, STEP | {KEY: value})
    assert [(event.step, event.onset) for event in events] == expected


def test_a_rule_whose_metric_a_run_never_logs_is_reported_once():
    rules = [
        GuardRule("train/loss_by/nowhere", above=3, action="stop"),
        GuardRule("train/loss_by/rare", above=3, action="stop"),
    ]
    detector = Detector(rules=rules)
    usual = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/total_valid_token_count": 9.0}
    found = []
    for step in range(1, 301):
        rare = {"train/loss_by/rare": 1.0} if step == 40 else {}
        found += detector.observe(step, usual | rare)
    (anomaly,) = found
    assert (anomaly.step, anomaly.level) == (50, Level.WARN)
    assert "this run does not log train/loss_by/nowhere" in anomaly.message


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (GuardRule("val/loss", above=3), "cannot read"),
        (GuardRule("train/loss", above=1, below=2), "'above' or 'below'"),
        (GuardRule(KEY, above=1, action="skip"), "skip"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_evaluated_or_carried_out_is_refused(rule, hint):
    good = GuardRule("train/loss", above=1, action="skip")
    with pytest.raises(ConfigError) as refused:
        require_usable_rules([good, rule])
    assert "trainer.guard.rules[1]" in str(refused.value) and hint in str(refused.value)
