"""Curves made small, smoothed and scaled: a drawing loses no spike, and no input breaks an axis."""

import math
import re

import numpy as np
import pytest

from trainer.report.curves import Scale, axis_labels, decimate, gaps, scale_of, smooth
from trainer.report.formatting import number
from trainer.report.page import NUM_COLUMNS, Curve, Figure, templates
from trainer.report.run_log import Series
from trainer.runtime.text import clean

SEED = 5


def series(*values: float, stride: int = 1) -> Series:
    return Series(np.arange(1, len(values) + 1) * stride, np.array(values, np.float64))


def drawn(one: Series) -> str:
    figure = Figure(
        "loss",
        "train/loss",
        scale_of(one.steps.tolist(), has_margin=False),
        (Curve(one, "s1", "loss"),),
    )
    return (
        templates()
        .get_template("plot.svg.jinja")
        .render(figure=figure, report={"profile": "sft"}, log=None)
    )


def test_a_million_points_become_few_and_every_spike_keeps_its_height() -> None:
    generator = np.random.default_rng(SEED)
    values = generator.normal(1.0, 0.01, 1_000_000)
    spikes = generator.choice(1_000_000, 100, replace=False)
    values[spikes[:50]], values[spikes[50:]] = 7.0, -7.0
    small = decimate(Series(np.arange(1_000_000), values), 400)
    assert len(small) <= 802
    columns = {
        (int(at) * 400 // 1_000_000, value)
        for at, value in zip(small.steps, small.values, strict=True)
    }
    assert {(int(at) * 400 // 1_000_000, values[at]) for at in spikes} <= columns, f"seed {SEED}"
    assert np.all(np.diff(small.steps) > 0) and (small.steps[0], small.steps[-1]) == (0, 999_999)


@pytest.mark.covers("S1.27")
def test_smoothing_starts_at_the_first_value_and_passes_over_what_is_not_finite() -> None:
    smoothed = smooth(series(4.0, math.nan, 2.0, math.inf, 2.0), 0.6)
    assert smoothed.steps.tolist() == [1, 3, 5]
    weights = [0.36, 0.6, 1.0]
    expected = (4.0 * weights[0] + 2.0 * weights[1] + 2.0 * weights[2]) / sum(weights)
    assert smoothed.values.tolist() == pytest.approx([4.0, (0.6 * 4 + 2) / 1.6, expected])
    assert len(smooth(series(), 0.9)) == 0


def test_a_line_is_interrupted_where_a_value_is_missing() -> None:
    holed = series(1.0, 2.0, math.nan, 1.0, math.nan, 2.0)
    known = Series(holed.steps[[0, 1, 3, 5]], holed.values[[0, 1, 3, 5]])
    assert gaps(holed, known).tolist() == [False, False, True, True]
    drawing = drawn(holed)
    path = re.search(r'<path class="s1" d="([^"]*)"', drawing)
    assert (
        path is not None
        and path[1].count("M") == 3
        and path[1].count("L") == 1
        and path[1].count("h0") == 2
    )
    assert drawing.count("is not finite at step") == 2 and "nan" not in drawing.lower().replace(
        "not finite", ""
    )


def test_a_million_missing_values_do_not_fill_the_page() -> None:
    missing = Series(np.arange(1_000_000), np.full(1_000_000, math.nan))
    assert 1 < drawn(missing).count("not finite") <= NUM_COLUMNS + 1


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([], False), ([], True), ([math.nan], False), ([0.0], False), ([5.0], True), ([-3.0, -3.0], False),
        ([-1e308, 1e308], False), ([5e-324, 1e308], True), ([1.0, 1.0 + 1e-15], False), ([0.0, -1.0], True),
        ([1e-9, 2e-9], False), ([1e15, 1e15 + 2], False), ([math.inf, 1.0, 2.0], False), ([1e12, 1e-12], True),
    ],
)  # fmt: skip
def test_every_axis_has_room_few_ticks_and_different_words(
    values: list[float], is_log: bool
) -> None:
    scale = scale_of(values, is_log=is_log)
    assert scale.low < scale.high and math.isfinite(scale.high - scale.low)
    ticks = scale.ticks()
    words = axis_labels(ticks, is_log=is_log)
    assert len(ticks) <= 12 and len(set(words)) == len(words)
    places = scale.place(np.array([*ticks, scale.low, scale.high]))
    assert np.isfinite(places).all() and places[-1] == 1.0


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 2.5, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        (1, 6000, ["2000", "4000", "6000"]),
        (0, 60_000, ["0", "20k", "40k", "60k"]),
        (1_234_500, 1_234_520, ["1,234,500", "1,234,505", "1,234,510", "1,234,515", "1,234,520"]),
        (71.39, 71.41, ["71.390", "71.395", "71.400", "71.405", "71.410"]),
        (0, 5e-5, ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
    ],
)
def test_ticks_are_round_and_their_words_short(low: float, high: float, words: list[str]) -> None:
    assert axis_labels(Scale(low, high).ticks(), is_log=False) == words


@pytest.mark.parametrize(
    ("low", "high"), [(2.1, 4.9), (10.4, 19.0), (3.0, 3.001), (0.21, 0.49), (5.1e4, 9e4)]
)
def test_a_log_axis_between_two_powers_still_has_ticks(low: float, high: float) -> None:
    scale = scale_of([low, high], is_log=True)
    words = axis_labels(scale.ticks(), is_log=True)
    assert len(set(words)) == len(words) >= 2 and all(
        scale.low <= tick <= scale.high for tick in scale.ticks()
    )


def test_a_log_axis_counts_in_powers_of_ten() -> None:
    ticks = Scale(2e4, 5e7, is_log=True).ticks()
    assert axis_labels(ticks, is_log=True) == ["100k", "1M", "10M"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"), (0.81234, "0.8123"), (1.5, "1.5"), (12345.0, "12,345"), (5.5e7, "5.5e7"), (2e-5, "2e-5"),
        (-0.25, "-0.25"), (math.nan, "–"), (None, "–"), (math.inf, "inf"), (-math.inf, "-inf"), (100.0, "100"),
        (99_999.9, "100,000"), (0.000999, "9.99e-4"),
    ],
)  # fmt: skip
def test_a_number_has_four_digits_everywhere(value: float | None, words: str) -> None:
    assert number(value) == words


def test_no_control_character_gets_through() -> None:
    assert clean("a\x1b[31mb\n\x00c") == "a�[31mb��c"
