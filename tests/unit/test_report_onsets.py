"""The step at which a fault began, the checkpoint to return to, and the limits of a log without its
run directory.
"""

from pathlib import Path

import numpy as np
import pytest
from log_formats import make_curves, write_transformers
from report_curves import checkpoints
from report_faults import judged, of_rule
from small_files import write_json

from trainer.tools.report.analyse import analyse
from trainer.tools.report.run_log import RunLog, Series

STEPS = np.arange(1, 601)


@pytest.mark.parametrize("onset", [200, 260, 300, 400])
@pytest.mark.parametrize("slope", [0.004, 0.01])
def test_a_slow_divergence_is_answered_with_a_checkpoint_from_before_it(onset, slope):
    saved = checkpoints(range(20, 601, 20))
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0, 0.05, 600)
        losses = 1.2 + np.exp(-STEPS / 60) + noise + slope * (STEPS - onset).clip(0)
        series = {"train/loss": Series(STEPS, losses)}
        log = RunLog(Path("run"), "transformers", series, 600, checkpoints=saved)
        finding = of_rule(analyse(log, profile="sft"), "loss_diverging")
        assert abs(finding.steps[0] - onset) <= 15, seed
        step = int(finding.remedy.split("checkpoint of step ")[1].split(".")[0])
        assert onset - 60 <= step <= onset, finding.remedy


@pytest.mark.parametrize(
    "saved", [[], [150, 200], [50, 200]], ids=["none", "the last two", "the best and the last"]
)
def test_checkpoints_that_are_not_next_to_a_log_are_not_missed(tmp_path, saved):
    """A log in a copied `checkpoint-200` without the run, and checkpoints that a limit may have
    removed.
    """
    run_dir = tmp_path / ("run" if saved else "checkpoint-200")
    for directory in (run_dir, *(run_dir / f"checkpoint-{step}" for step in saved)):
        directory.mkdir()
        write_transformers(directory, make_curves())
        if saved:
            write_json(directory / "args.json", {"save_steps": 50})
    report = judged(run_dir)
    assert "ckpt_complete" not in {finding.rule for finding in report.findings}
    assert (report.generalisation.recommended_path is None) == (not saved)
