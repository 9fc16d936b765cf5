"""Rates off their schedule, levels that stay up, and healthy starts that once raised a false
alarm.
"""

from pathlib import Path

import numpy as np
from report_curves import changed, sft_run

from trainer.tools.report.analyse import analyse
from trainer.tools.report.run_log import RunLog, Series

SEED = 5
STEPS = np.arange(1, 401)


def test_a_rate_that_jumps_without_harm_is_still_told():
    rate = sft_run(0).series["train/lr"].values.copy()
    rate[999:1009] *= 10
    report = analyse(changed(sft_run(0), **{"train/lr": rate}))
    assert [f.id for f in report.top] == ["lr_schedule:raised"] and report.top[0].steps == (
        1000,
        1009,
    )


def test_a_loss_that_jumps_and_stays_up_is_an_interval_that_did_not_recover():
    rng = np.random.default_rng(SEED)
    loss = 2 * np.exp(0.05 * rng.normal(size=400)) * np.where(STEPS > 250, 1.8, 1.0)
    log = RunLog(Path("run"), "csv", {"train/loss": Series(STEPS, loss)}, 400)
    (anomaly,) = analyse(log).anomalies
    assert anomaly.steps[0] == 251 and not anomaly.has_recovered, f"seed {SEED}: {anomaly}"


def test_memory_of_the_first_steps_is_no_leak():
    series = {
        "train/loss": Series(STEPS, 2 - STEPS / 400),
        "train/time(s)": Series(STEPS, np.ones(400)),
        "memory/cpu/rss_gib": Series(STEPS, 1.8 + STEPS / 1000),
    }
    report = analyse(RunLog(Path("run"), "fsdp-sft", series, 400))
    assert not [f for f in report.findings if f.rule == "memory"]
