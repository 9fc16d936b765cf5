"""The window that says what is usual: right numbers, unspoilt by outliers, exact after a
restart.
"""

import json
import math

import numpy as np
import pytest

from trainer.detection.steps import MIN_GRAD_SPREAD, MIN_LOSS_SPREAD
from trainer.detection.window import RobustWindow, Usual


def filled(values: np.ndarray, min_log_spread: float = 1e-9, size: int = 128) -> RobustWindow:
    window = RobustWindow(min_log_spread, size=size)
    for value in values.tolist():
        window.push(value)
    return window


def measured(window: RobustWindow) -> Usual:
    assert window.usual is not None
    return window.usual


def by_numpy(values: np.ndarray) -> tuple[float, float]:
    centre = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - centre))
    return float(centre), float(max(spread, (np.quantile(values, 0.95) - centre) / 1.645))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("num_points", [32, 33, 127, 128, 500])
def test_centre_and_spread_are_those_of_the_last_values(num_points: int, sign: float) -> None:
    """Small noise: nothing is winsorised. Below zero the values themselves count, above their
    logarithms.
    """
    values = sign * np.exp(np.random.default_rng(num_points).uniform(-0.3, 0.3, num_points))
    usual = measured(filled(values))
    assert usual.is_log == (sign > 0)
    last = values[-128:]
    assert (usual.centre, usual.scale) == pytest.approx(
        by_numpy(np.log(last) if sign > 0 else last), rel=1e-12
    )


def test_nothing_is_usual_before_the_least_number_of_points() -> None:
    assert filled(np.ones(31)).usual is None
    assert measured(filled(np.ones(32))).level == 1.0


def test_a_quiet_window_has_the_floor_for_its_spread() -> None:
    assert measured(filled(np.full(40, 2.0), MIN_LOSS_SPREAD)).scale == 0.05
    assert measured(filled(np.full(40, 2.0), MIN_GRAD_SPREAD)).scale == 0.10
    assert measured(filled(np.full(40, -2.0), MIN_LOSS_SPREAD)).scale == pytest.approx(0.1), (
        "5% of the centre"
    )
    assert measured(filled(np.full(40, -1e-4), MIN_LOSS_SPREAD)).scale == 1e-3


def test_one_value_at_zero_changes_the_domain_until_it_leaves() -> None:
    window = filled(np.full(40, 2.0), MIN_LOSS_SPREAD, size=64)
    window.push(0.0)
    for _ in range(64):
        assert not measured(window).is_log
        window.push(2.0)
    assert measured(window).is_log and measured(window).level == pytest.approx(2.0)


def test_outliers_do_not_hide_later_ones_but_a_new_level_is_learned() -> None:
    window = filled(np.full(128, 2.0), MIN_LOSS_SPREAD)
    window.push(2000.0)
    assert measured(window).scale == 0.05 and measured(window).z(6.0) > 20
    alarms = 0
    while measured(window).z(4.0) > 8:
        window.push(4.0)
        alarms += 1
    assert 5 <= alarms <= 10, "a shift to twice the level is learned within a few steps"


def test_only_rises_are_winsorised() -> None:
    window = filled(np.ones(128), MIN_LOSS_SPREAD)
    window.push(1e-6)
    window.push(1e6)
    assert min(window.state_dict()) == 1e-6 and max(window.state_dict()) == pytest.approx(
        math.exp(6 * 0.05)
    )


def test_scores_and_values_are_inverse_and_never_overflow() -> None:
    for usual in (Usual(1.0, 0.1, True), Usual(-3.0, 0.5, False)):
        assert usual.z(usual.at(7.5)) == pytest.approx(7.5)
    assert Usual(600.0, 100.0, True).at(8) < math.inf
    below = Usual(0.0, 0.1, True)
    assert below.z(0.0) == pytest.approx(-10) and below.z(-1.0) == pytest.approx(-20), (
        "finite without a logarithm"
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_restored_window_goes_on_bit_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = RobustWindow(MIN_LOSS_SPREAD, size=40)
    for value in (rng.normal(0.3, 0.3, 300) * rng.choice([1, 100], 300, p=[0.95, 0.05])).tolist():
        restored = RobustWindow(MIN_LOSS_SPREAD, size=40)
        restored.load_state_dict(json.loads(json.dumps(window.state_dict())))
        window.push(value)
        restored.push(value)
        assert restored.state_dict() == window.state_dict() and restored.usual == window.usual, (
            f"seed {seed}"
        )
