"""Runs of a controller by their CSV histories (requirement text S1): good runs cause no finding,
and faults are found.
"""

from dataclasses import replace

import numpy as np
import pytest
from grpo_curves import HISTORY_COLUMNS, controller_histories, write_history
from numpy.typing import NDArray
from report_curves import changed, controller_run
from report_faults import judged, serious, told
from sweeps import some

from trainer.tools.report.analyse import analyse
from trainer.tools.report.run_log import Series

Table = NDArray[np.float64]
REWARD = HISTORY_COLUMNS.index("reward_mean")


def write(directory, train, val=None):
    directory.mkdir(parents=True, exist_ok=True)
    write_history(directory / "training_history.csv", train)
    if val is not None:
        write_history(directory / "validation_history.csv", val)
    return directory


@pytest.mark.covers("S1.22 S1.26 S1.33 S1.42")
def test_no_good_run_is_told_to_stop(tmp_path):
    for seed in some(range(60), 12):
        train, val = controller_histories(seed)
        both = judged(write(tmp_path / f"{seed}", train, val))
        alone = judged(write(tmp_path / f"{seed}-alone", train))
        assert both.profile == alone.profile == "controller"
        assert (serious(both), serious(alone)) == ({}, {}), f"seed {seed}"
        found = both.generalisation
        assert found.metric == "val/reward_mean"
        assert found.recommended_step == int(np.argmax(np.round(val[:, REWARD], 4))) + 1
        assert alone.generalisation is None, "a policy loss recommends nothing"


@pytest.mark.covers("S1.19")
def test_a_latency_above_its_budget_is_told_where_the_budget_is_given(tmp_path):
    train, _ = controller_histories(0)
    run_dir = write(tmp_path / "run", train)
    assert judged(run_dir).verdict == "OK", "no budget is known"
    (run_dir / "args.json").write_text('{"latency_budget": 250}')
    assert judged(run_dir).verdict == "OK", "it ends at 245 ms"
    (run_dir / "args.json").write_text('{"latency_budget": 230}')
    too_slow = told(judged(run_dir))["budget:latency"]
    assert too_slow.value == pytest.approx(245 / 230, abs=0.01) and too_slow.level == "warn"


def by_batch(log, *, batches=20):
    """Return the run with one row per batch. All batches of an epoch have the epoch's values."""
    num_epochs = len(log.series["reward_mean"])
    steps = np.arange(1, num_epochs * batches + 1)
    series = {key: Series(steps, np.repeat(one.values, batches)) for key, one in log.series.items()}
    series["progress/epoch"] = Series(steps, steps / batches)
    return replace(log, series=series, num_rows=len(steps), total_steps=len(steps))


def test_a_controller_that_logs_batches_is_judged_by_its_epochs():
    log = controller_run(0)
    right = log.series["accuracy_mean"].values.copy()
    right[:3] = 0.0
    report = analyse(by_batch(changed(log, accuracy_mean=right)))
    assert report.profile == "controller"
    assert "accuracy:zero" not in {finding.id for finding in report.findings}
    right[:25] = 0.0
    zero = told(analyse(by_batch(changed(log, accuracy_mean=right))))["accuracy:zero"]
    assert zero.steps == (20, 500), "the first to the last of 25 epochs of 20 batches"
