"""The statistics and shapes that the checks use, the schedules, and the tables of limits."""

import numpy as np
import pytest

from trainer.optim.schedule import LrSchedule
from trainer.tools.report.learning_rate import learning_rate, raised_rates, restarted_at
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import beyond, departures, shift
from trainer.tools.report.statistics import slope


def series(values):
    return Series(np.arange(1, len(values) + 1), np.asarray(values, dtype=np.float64))


def test_mann_kendall_agrees_with_the_textbook():
    """Ten rising points: S = 45, variance 125, z = 44 / sqrt(125)."""
    assert slope(series(np.arange(10.0))).p_value == pytest.approx(8.3e-5, rel=0.01)
    assert slope(series(np.full(10, 3.0))).p_value == 1
    assert slope(series(np.arange(3.0))).p_value == 1, "three points prove nothing"


def test_bursts_do_not_hide_behind_each_other_and_batches_of_two_kinds_are_usual():
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, 2000)
    for first in (600, 640, 680, 720):
        values[first : first + 6] = 20
    z, _, _ = departures(values, 1e-3)
    assert z[600:606].min() > 6 and np.abs(z[1000:]).max() < 6, "seed 3"
    two = np.where(rng.random(4000) < 0.1, 1.8, 1.0) * np.exp(rng.normal(0, 0.03, 4000))
    assert (departures(np.log(two), 0.05)[0] > 8).mean() < 0.01, "seed 3"


@pytest.mark.parametrize("num_points", [60, 2000, 1_000_000])
@pytest.mark.parametrize("begins", [0.3, 0.9])
def test_a_level_that_shifts_and_a_band_that_is_left_have_their_onset(num_points, begins):
    """A million points are handled without a window for each point."""
    values = np.random.default_rng(4).normal(1.0, 0.05, num_points)
    at = int(begins * num_points)
    values[at:] -= 0.5
    found = shift(series(values), sign=-1)
    left = beyond(series(values), low=0.8)
    assert found.is_lasting
    assert (found.before, found.after) == pytest.approx((1.0, 0.5), abs=0.1)
    tolerance = max(3, num_points // 200)
    assert abs(found.steps[0] - at) <= tolerance and abs(left.steps[0] - at) <= tolerance
    assert shift(series(values[:at]), sign=-1) is None


def test_a_band_left_in_the_first_window_of_a_million_points_is_found():
    values = np.zeros(1_000_000)
    values[49] = 1
    left = beyond(series(values), high=0.5, width=1)
    assert left.ends == (50, 50)


T = np.arange(1, 2001)
UP = np.minimum(T / 100, 1)
SCHEDULES = {
    "constant": np.full(2000, 1.0),
    "linear": UP * (1 - (T - 100).clip(0) / 1900),
    "cosine to a tenth": UP * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (T - 100).clip(0) / 1900))),
    "cosine cut off": UP * 0.5 * (1 + np.cos(np.pi * (T - 100).clip(0) / 7000)),
    "cosine of three digits": np.round(UP * 0.5 * (1 + np.cos(np.pi * (T - 100) / 1900)), 3),
    "step": np.select([T < 800, T < 1500], [1.0, 0.1], 0.01),
    "unknown": UP * np.sqrt(100 / np.maximum(T, 100)),
}


@pytest.mark.covers("S2.10 S3.33")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_recognised(name):
    told = learning_rate(Series(T, 3e-5 * SCHEDULES[name]), (), 2000)
    assert told.schedule == name.split()[0] and told.peak == pytest.approx(3e-5, rel=0.01)


@pytest.mark.covers("S3.33")
@pytest.mark.parametrize("total_steps", [60, 233, 1000])
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_the_schedules_of_this_trainer_are_recognised_however_short(kind, total_steps):
    own = LrSchedule(kind, 1e-3, total_steps, total_steps // 10, min_lr_ratio=0.0)
    steps = np.arange(1, total_steps + 1)
    rates = np.array([own.lr_at(int(step)) for step in steps])
    told = learning_rate(Series(steps, rates), (), total_steps)
    assert told.schedule == kind and told.raised == () and told.warmup_steps == total_steps // 10


@pytest.mark.parametrize(
    ("where", "expected"),
    [(slice(999, None), [((1000, 2000), False)]), (slice(9, 20), [((10, 20), True)])],
    ids=["to the end", "in the warm-up"],
)
def test_a_raised_rate_is_found_to_the_point(where, expected):
    values = SCHEDULES["linear"].copy()
    values[where] *= 20
    assert [(found.steps, found.is_over) for found in raised_rates(Series(T, values))] == expected


@pytest.mark.parametrize(("num_restarts", "expected"), [(8, 100), (9, None)])
def test_a_rate_that_restarts_too_often_follows_no_schedule(num_restarts, expected):
    warmup = np.minimum(np.arange(100) / 50, 1)
    rate = np.concatenate([np.ones(100), *[warmup] * num_restarts])
    assert restarted_at(series(rate)) == expected
