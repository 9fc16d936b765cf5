"""When one step stands out: each level at its limits, and a device that decides alone decides
the same.
"""

import math

import numpy as np
import pytest
from curves import LOSSES, Curve, healthy
from guard_trials import watch

from trainer.detection import Detector, Level, StepAnomaly

WARM = 100


def flat(*steps: tuple[float, float]) -> Curve:
    """Loss 2 and gradient 1 for WARM steps (spreads at their floors, 0.05 and 0.10), then the
    given ones.
    """
    loss, grad_norm = zip(*([(2.0, 1.0)] * WARM + list(steps)), strict=True)
    return Curve(np.array(loss), np.array(grad_norm))


def events(*steps: tuple[float, float]) -> list[StepAnomaly]:
    return watch(flat(*steps))


def levels(*steps: tuple[float, float]) -> list[tuple[int, str]]:
    """(steps after WARM, level) of all events."""
    return [(event.step - WARM, event.level.value) for event in events(*steps)]


def test_a_loss_half_as_high_again_is_a_warning() -> None:
    assert levels((2 * 1.505, 1.0)) == [(0, "warn")]
    assert levels((2 * 1.495, 1.0)) == [], "z 8.04 alone is not enough"


def test_a_warning_says_what_is_usual() -> None:
    (event,) = events((4.0, 1.0))
    assert (event.signal, event.value, event.onset) == ("train/loss", 4.0, WARM)
    assert event.centre == pytest.approx(2.0) and event.ratio == pytest.approx(2.0)
    assert event.z == pytest.approx(math.log(2) / 0.05)
    assert event.message == "train/loss is 4, 2 times its usual 2 (z 13.9)"


@pytest.mark.covers("S2.9")
def test_a_gradient_is_judged_by_its_own_level() -> None:
    assert levels((2.0, 5.1)) == [(0, "warn")]
    assert levels((2.0, 4.9)) == [], "z 15.9 alone is not enough"
    assert levels((2.0, 50.5)) == [(0, "severe")]
    usual = Curve(np.full(WARM + 1, 2.0), np.full(WARM + 1, 3.2e4))
    usual.grad_norm[-1] = 4.7e6
    (event,) = watch(usual)
    assert (event.level, event.signal) == (Level.SEVERE, "train/grad_norm")
    assert event.ratio == pytest.approx(147, rel=0.01)


@pytest.mark.covers("S2.25")
def test_a_high_loss_is_severe_with_a_high_gradient_of_the_last_three_steps() -> None:
    low, high = math.exp(0.59), math.exp(0.61)  # z 5.9 and 6.1
    assert levels((4.1, low)) == [(0, "warn")]
    assert levels((4.1, high)) == [(0, "severe")]
    assert levels((3.9, high)) == [(0, "warn")], "not twice as high"
    for steps_between, expected in ((0, "severe"), (1, "severe"), (2, "warn")):
        found = events((2.0, high), *[(2.0, 1.0)] * steps_between, (4.1, 1.0))
        assert [event.level for event in found] == [expected]
        assert found[0].onset == (WARM if expected == "severe" else found[0].step)


def test_the_third_high_loss_within_five_steps_is_severe() -> None:
    high, usual = (3.3, 1.0), (2.0, 1.0)
    assert levels(high, usual, high, usual, high) == [(0, "warn"), (4, "severe")]
    assert levels(high, usual, high, usual, usual, high) == [(0, "warn")], "within six"
    assert levels(high, high, usual, usual, usual) == [(0, "warn")], (
        "an ordinary step is never severe"
    )


@pytest.mark.covers("S2.38")
def test_limits_before_a_step_say_what_will_be_severe() -> None:
    detector = Detector()
    assert detector.limits().is_severe(loss=1e9, grad_norm=1e9) is False, "nothing is known yet"
    watch(flat(), detector=detector)
    limits = detector.limits()
    assert limits.loss_with_grad == pytest.approx(4.0) and limits.grad_with_loss == pytest.approx(
        math.exp(0.6)
    )
    assert (limits.loss_alone, limits.grad_alone) == (math.inf, pytest.approx(50.0))


def test_a_gradient_of_zero_does_not_change_what_is_usual() -> None:
    detector = Detector()
    watch(flat((2.0, 0.0)), detector=detector)
    assert detector.limits().grad_with_loss == pytest.approx(math.exp(0.6))


@pytest.mark.parametrize("loss", [*LOSSES, "signed"])
def test_limits_and_verdict_agree_exactly(loss: str) -> None:
    """Also at the limits themselves and one float above them, where comparisons that differ
    would show.
    """
    seed = 11
    rng = np.random.default_rng(seed)
    curve = healthy(("gauss" if loss == "signed" else loss, "heavy"), seed=seed, num_steps=700)
    if loss == "signed":
        curve.loss[:] = rng.normal(0, 0.02, len(curve.loss))
    detector, num_severe = Detector(), 0
    for step in range(700):
        limits, values = detector.limits(), curve.values(step)
        if rng.random() < 0.2:
            values["train/loss"] *= rng.choice([1.4, 1.6, 3.0, 10.0])
            values["train/grad_norm"] *= rng.choice([1.0, 4.0, 8.0, 200.0])
        for key, limit in (
            ("train/loss", limits.loss_with_grad),
            ("train/grad_norm", limits.grad_with_loss),
        ):
            if limit < math.inf and rng.random() < 0.1:
                values[key] = limit if rng.random() < 0.5 else math.nextafter(limit, math.inf)
        expected = limits.is_severe(loss=values["train/loss"], grad_norm=values["train/grad_norm"])
        is_severe = any(event.level is Level.SEVERE for event in detector.observe(step, values))
        assert is_severe == expected, f"seed {seed}, step {step}: {values}"
        num_severe += expected
    assert 5 < num_severe < 650
