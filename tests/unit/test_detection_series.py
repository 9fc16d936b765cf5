"""Whole series: the bursts of the analysed run, falls as well as rises, long series, diverging stretches."""

import numpy as np
import pytest
from grpo_curves import BURSTS, INTERVALS, LOG_EVERY, grpo_run

from trainer.detection.series import episodes, generic_scale, intervals, score, spikes
from trainer.detection.window import GRAD_SCALE, LOSS_SCALE

STEPS = range(LOG_EVERY, 6001, LOG_EVERY)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.covers("S2.21", "S2.22", "S2.8")
def test_the_seven_bursts_of_the_analysed_run_and_no_eighth(seed: int) -> None:
    """Each metric on its own: exactly its own points stand out. All together: the seven intervals of the table.

    Lengths vary by nature: of their burst only the far end stands out, and only where one looks for companions (z 6).
    """
    is_any = np.zeros(len(STEPS), dtype=bool)
    for key, series in grpo_run(seed).items():
        is_long = key == "completions/mean_length"
        is_out = spikes(series, z=6 if is_long else 8)
        found = {step for step, out in zip(STEPS, is_out, strict=True) if out}
        expected = found & set(BURSTS[key]) | {2870} if is_long else set(BURSTS[key])
        assert found == expected, f"{key}, seed {seed}"
        is_any |= is_out
    assert intervals(STEPS, is_any, max_gap=3 * LOG_EVERY) == list(INTERVALS)


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_of_the_analysed_run_by_the_guards_own_scales(seed: int) -> None:
    series = grpo_run(seed)
    for key, scale in (("loss", LOSS_SCALE), ("grad_norm", GRAD_SCALE)):
        found = {step for step, out in zip(STEPS, spikes(series[key], scale=scale), strict=True) if out}
        assert found == set(BURSTS[key]), f"{key}, seed {seed}"


def test_a_score_says_level_and_ratio() -> None:
    values = np.full(100, 4.0)
    values[60] = 12.0
    values[70] = 1.0
    scores = score(values)
    assert np.isnan(scores.z[:32]).all() and np.isfinite(scores.z[32:]).all()
    assert (scores.level[60], scores.ratio[60]) == (pytest.approx(4.0), pytest.approx(3.0))
    assert scores.z[60] == pytest.approx(np.log(3) / 0.05)
    assert np.flatnonzero(scores.is_spike()).tolist() == [60, 70]
    assert np.flatnonzero(scores.is_spike(ratio=3.5)).tolist() == [70], "a fall to a quarter"


def test_a_signed_series_has_no_ratio() -> None:
    values = np.random.default_rng(0).normal(0, 1, 200)
    values[150] = 100.0
    scores = score(values)
    assert np.isnan(scores.ratio[150]) and np.flatnonzero(scores.is_spike(ratio=2.0)).tolist() == [150]


def test_points_that_are_no_number_are_passed_over() -> None:
    values = np.full(100, 4.0)
    values[[10, 50, 60]] = np.nan, np.inf, 20.0
    assert np.flatnonzero(spikes(values)).tolist() == [60]
    assert not spikes(np.full(100, np.nan)).any() and not spikes(np.array([])).any()


def test_a_metric_that_is_mostly_zero_stands_out_by_its_range() -> None:
    """Truncated shares: a flicker of 0.01 is nothing beside bursts to 0.9."""
    values = np.zeros(400)
    values[100::37], values[300:303] = 0.01, 0.9
    assert np.flatnonzero(spikes(values)).tolist() == [300, 301, 302]
    assert generic_scale(values).raw_floor == pytest.approx(0.018)


def test_a_constant_series_has_no_spike() -> None:
    assert not spikes(np.zeros(200)).any() and not spikes(np.full(200, -3.0)).any()


def test_a_long_series_is_judged_alike() -> None:
    """Beyond 20000 points what is usual is measured every few points only."""
    rng = np.random.default_rng(1)
    values = 3 * np.exp(rng.normal(0, 0.1, 60_000))
    values[[20_001, 40_003, 40_004]] *= 8
    assert np.flatnonzero(spikes(values)).tolist() == [20_001, 40_003, 40_004]


def test_neighbouring_spikes_are_one_interval() -> None:
    is_spike = np.isin(np.arange(10, 110, 10), [20, 30, 60, 100])
    assert intervals(range(10, 110, 10), is_spike, max_gap=30) == [(20, 60), (100, 100)]
    assert intervals(range(10, 110, 10), is_spike, max_gap=40) == [(20, 100)]


@pytest.mark.covers("S1.14")
def test_every_diverging_stretch_is_found_with_its_end() -> None:
    losses = np.full(1000, 2.0)
    losses[300:500] = losses[800:] = 2.6
    losses[320] = np.nan
    first, second = episodes(losses)
    assert (first.onset, second.onset) == (pytest.approx(300, abs=3), pytest.approx(800, abs=2))
    assert first.certain == pytest.approx(349, abs=3) and first.end == pytest.approx(545, abs=5)
    assert second.end == 999
