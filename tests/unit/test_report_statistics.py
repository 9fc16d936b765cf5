"""The statistics below the rules, the schedules, the overfitting rule and the file of limits."""

import math
from pathlib import Path

import numpy as np
import pytest

from trainer.detection.watches import OVERFITTING, judge_validations
from trainer.optim.schedule import LrSchedule
from trainer.report.learning_rate import learning_rate
from trainer.report.limits import merged, read_thresholds
from trainer.report.run_log import Series
from trainer.report.statistics import (
    level_shift,
    mann_kendall,
    slope,
    usual_range,
)

STEPS = np.arange(1, 1001)


def series(values: np.ndarray) -> Series:
    return Series(np.arange(1, len(values) + 1), np.asarray(values, dtype=np.float64))


def test_mann_kendall_agrees_with_the_textbook() -> None:
    """Ten rising points: S = 45, variance 125, z = 44 / sqrt(125)."""
    z, p = mann_kendall(np.arange(10.0))
    assert z == pytest.approx(44 / math.sqrt(125)) and p == pytest.approx(8.3e-5, rel=0.01)
    assert mann_kendall(np.full(10, 3.0)) == (0.0, 1.0)
    assert mann_kendall(np.arange(3.0)) == (0.0, 1.0), "three points prove nothing"


def test_false_trends_are_as_rare_as_their_level_says() -> None:
    rng = np.random.default_rng(1)
    found = sum(slope(series(rng.normal(1, 0.1, 500))).p_value < 0.05 for _ in range(200))
    assert found <= 20, "5 % of 200, seed 1"


def test_bursts_do_not_hide_behind_each_other() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, 2000)
    for first in (600, 640, 680, 720):
        values[first : first + 6] = 20
    z, _, _ = usual_range(values, level_window=32, spread_window=128, floor=1e-3, relative_floor=0)
    assert z[600:606].min() > 6 and np.abs(z[1000:]).max() < 6, "seed 3"


def test_batches_of_two_kinds_are_usual() -> None:
    rng = np.random.default_rng(4)
    values = np.where(rng.random(4000) < 0.1, 1.8, 1.0) * np.exp(rng.normal(0, 0.03, 4000))
    z, _, _ = usual_range(
        np.log(values), level_window=32, spread_window=128, floor=0.05, relative_floor=0
    )
    assert (z > 8).mean() < 0.01, "seed 4"


T = np.arange(1, 2001)
UP = np.minimum(T / 100, 1)
LIMITS = merged(None)
SCHEDULES = {
    "constant": np.full(2000, 1.0),
    "linear": UP * (1 - (T - 100).clip(0) / 1900),
    "cosine": UP * 0.5 * (1 + np.cos(np.pi * (T - 100).clip(0) / 1900)),
    "cosine to a tenth": UP * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (T - 100).clip(0) / 1900))),
    "cosine cut off": UP * 0.5 * (1 + np.cos(np.pi * (T - 100).clip(0) / 7000)),
    "wsd": UP * np.clip((2000 - T) / 300, 0, 1),
    "step": np.select([T < 800, T < 1500], [1.0, 0.1], 0.01),
    "unknown": UP * np.where((T // 150) % 2, 1.0, 0.4),
}


@pytest.mark.covers("S2.10", "S3.33")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_recognised(name: str) -> None:
    told = learning_rate(Series(T, 3e-5 * SCHEDULES[name]), (), limits=LIMITS, total_steps=2000)
    assert told.schedule == name.split()[0] and told.peak == pytest.approx(3e-5)
    if name not in ("constant", "step", "unknown"):
        assert told.warmup_steps == 100


@pytest.mark.covers("S3.43")
def test_the_overfitting_rule_on_the_example() -> None:
    verdicts = judge_validations([1.5, 1.3, 1.4, 1.6], [1.2, 0.8, 0.5, 0.3])
    assert verdicts == ["ok", "ok", "note", "overfit"]


def test_noisy_plateaus_are_seldom_called_overfitting() -> None:
    rng = np.random.default_rng(6)
    train, plateau = np.linspace(1.2, 0.9, 20), 1.0 + 0.6 * np.exp(-np.arange(20) / 4)
    false = sum(
        "overfit" in judge_validations(plateau + rng.normal(0, 0.005, 20), train)
        for _ in range(200)
    )
    assert false <= 4, f"{false} of 200, seed 6"


def test_the_file_of_limits_names_line_and_near_name_of_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("# mine\nloss_ratio: 3\n\nkl_high: 8  # nat\n")
    assert read_thresholds(path) == {"loss_ratio": 3.0, "kl_high": 8.0}
    assert merged(read_thresholds(path))["kl_high"] == 8.0 and merged(None)["kl_high"] == 5.0
    path.write_text("loss_ratio: high\n")
    with pytest.raises(ValueError, match="line 1: 'loss_ratio: high' is not"):
        read_thresholds(path)
    path.write_text("kl_hihg: 3\n")
    with pytest.raises(ValueError, match="did you mean 'kl_high'"):
        read_thresholds(path)


def test_every_limit_has_a_reader() -> None:
    """A limit that no rule reads is a dead flag."""
    import trainer.report as package

    source = "".join(p.read_text() for p in Path(package.__path__[0]).glob("*.py"))
    unread = [name for name in LIMITS if source.count(f'"{name}"') < 2 and name not in OVERFITTING]
    assert unread == []


@pytest.mark.covers("S3.33")
@pytest.mark.parametrize("total_steps", [40, 60, 233, 1000])
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_the_schedules_of_this_trainer_are_recognised_however_short(
    kind: str, total_steps: int
) -> None:
    own = LrSchedule(kind, 1e-3, total_steps, total_steps // 10, min_lr_ratio=0.0)
    steps = np.arange(1, total_steps + 1)
    rates = np.array([own.lr_at(int(step)) for step in steps])
    told = learning_rate(Series(steps, rates), (), limits=LIMITS, total_steps=total_steps)
    few_points = {"wsd": "step"} if total_steps == 40 else {}  # its decay is four points long
    assert told.schedule == few_points.get(kind, kind) and told.raised == ()
    assert told.warmup_steps == total_steps // 10


def test_a_fall_is_found_in_a_million_points_without_a_window_for_each() -> None:
    values = np.random.default_rng(4).normal(1.0, 0.1, 1_000_000)
    values[700_000:] -= 0.5
    found = level_shift(series(values), sign=-1, sigma=6, share=0.25)
    assert found is not None and found.is_lasting and abs(found.steps[0] - 700_000) < 30_000
    assert (found.before, found.after) == pytest.approx((1.0, 0.5), abs=0.01)
