"""Rates off their schedule, levels that stay up, and healthy starts that once raised a false
alarm.
"""

from pathlib import Path

import numpy as np
import pytest
from report_curves import changed, sft_run

from trainer.report.analyse import analyse
from trainer.report.learning_rate import raised_rates
from trainer.report.run_log import RunLog, Series

SEED = 5
STEPS = np.arange(1, 401)
RATE = 1e-3 * np.minimum(STEPS / 40, 0.5 * (1 + np.cos(np.pi * (STEPS - 40).clip(min=0) / 360)))


def lifted(
    rate: np.ndarray, where: slice, factor: float
) -> tuple[tuple[tuple[int, int], bool], ...]:
    values = rate.copy()
    values[where] *= factor
    return tuple(
        (found.steps, found.is_over) for found in raised_rates(Series(STEPS, values), jump=3)
    )


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (slice(199, 210), (((200, 210), True),)),
        (slice(199, 200), (((200, 200), True),)),
        (slice(199, None), (((200, 400), False),)),
        (slice(9, 20), (((10, 20), True),)),
    ],
    ids=["a stretch", "one point", "to the end", "in the warm-up"],
)
def test_a_raised_rate_is_found_to_the_point(where: slice, expected: tuple[object, ...]) -> None:
    assert lifted(RATE, where, 20.0) == expected


@pytest.mark.parametrize(
    "rate",
    [
        RATE,
        np.tile(0.5 * (1 + np.cos(np.pi * np.arange(100) / 100)), 4),
        np.where((STEPS > 100) & (STEPS < 200), 0.01, 1.0),
        np.select([STEPS < 200, STEPS < 300], [1.0, 0.1], 0.01),
        np.maximum(0, STEPS - 1.0),
        np.where(STEPS == 1, 1e-6, 1.0),
    ],
    ids=[
        "cosine",
        "cosines that restart",
        "a dip",
        "steps down",
        "warm-up from 0",
        "a first step of almost 0",
    ],
)
def test_what_a_schedule_does_by_itself_is_no_jump(rate: np.ndarray) -> None:
    assert raised_rates(Series(STEPS, rate), jump=3) == ()


def test_a_rate_that_jumps_without_harm_is_still_told() -> None:
    rate = sft_run(0).series["train/lr"].values.copy()
    rate[999:1009] *= 10
    report = analyse(changed(sft_run(0), **{"train/lr": rate}))
    assert [f.id for f in report.top] == ["lr_schedule:raised"] and report.top[0].steps == (
        1000,
        1009,
    )
    assert [(a.steps, a.metric, a.chain) for a in report.anomalies] == [
        ((1000, 1009), "train/lr", ("train/lr",))
    ]


def test_a_loss_that_jumps_and_stays_up_is_an_interval_that_did_not_recover() -> None:
    rng = np.random.default_rng(SEED)
    loss = 2 * np.exp(0.05 * rng.normal(size=400)) * np.where(STEPS > 250, 1.8, 1.0)
    log = RunLog(Path("run"), "csv", {"train/loss": Series(STEPS, loss)}, 400)
    (anomaly,) = analyse(log).anomalies
    assert anomaly.steps[0] == 251 and not anomaly.has_recovered, f"seed {SEED}: {anomaly}"


def test_every_tenth_batch_of_another_kind_is_no_interval() -> None:
    rng = np.random.default_rng(SEED)
    loss = 2 * np.exp(0.05 * rng.normal(size=400)) * np.where(rng.random(400) < 0.1, 1.8, 1.0)
    log = RunLog(Path("run"), "csv", {"train/loss": Series(STEPS, loss)}, 400)
    assert analyse(log).anomalies == (), f"seed {SEED}"


def test_memory_of_the_first_steps_is_no_leak() -> None:
    series = {
        "train/loss": Series(STEPS, 2 - STEPS / 400),
        "train/time(s)": Series(STEPS, np.ones(400)),
        "memory/cpu/rss_gib": Series(STEPS, 1.8 + STEPS / 1000),
    }
    report = analyse(RunLog(Path("run"), "fsdp-sft", series, 400))
    assert not [f for f in report.findings if f.rule == "V26"]


@pytest.mark.parametrize(("share", "is_told"), [(0.3, False), (0.8, True)])
def test_large_gradients_of_the_start_are_not_said_to_be_clipped_throughout(
    share: float, is_told: bool
) -> None:
    norms = np.where(STEPS <= 200, 3.0, np.where(10 * share > STEPS % 10, 1.2, 0.8))
    series = {"train/loss": Series(STEPS, 2 - STEPS / 400), "train/grad_norm": Series(STEPS, norms)}
    series["optim/clipped_frac"] = Series(STEPS, (norms > 1.0).astype(float))
    report = analyse(RunLog(Path("run"), "fsdp-sft", series, 400, config={"optim.clip_grad": 1.0}))
    assert ("grad_unclipped:clipped" in {f.id for f in report.findings}) == is_told


@pytest.mark.parametrize(
    ("model", "levels"), [("quickstart", []), ("/models/pretrained", ["warn"])]
)
def test_a_high_first_loss_is_a_fault_of_weights_that_should_be_pretrained(
    model: str, levels: list[str]
) -> None:
    series = {"train/loss": Series(STEPS, np.linspace(8, 1, 400))}
    log = RunLog(Path("run"), "fsdp-sft", series, 400, config={"model.partial_pretrain": model})
    assert [f.level for f in analyse(log).findings if f.rule == "V03"] == levels


def test_a_rate_that_jumps_all_the_time_was_lifted_off_no_schedule() -> None:
    noise = np.random.default_rng(SEED).random(len(STEPS))
    assert raised_rates(Series(STEPS, noise), jump=3) == ()
