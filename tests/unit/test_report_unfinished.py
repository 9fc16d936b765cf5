"""The planned length of a run, and whether it was completed, from the files of runs that ended in
various ways.
"""

import os
import socket

import numpy as np
import pytest
from report_faults import judged, line
from small_files import write_json

from trainer.cli import report as command
from trainer.tracking import Tracking

NUM_STEPS = 186


def train(run_dir, steps, *, total_steps=NUM_STEPS):
    """A healthy attempt that logs `steps` and is never closed, as after a kill."""
    losses = (
        1.0
        + 1.2 * np.exp(-np.arange(NUM_STEPS) / 30)
        + np.random.default_rng(7).normal(0, 0.02, NUM_STEPS)
    )
    tracking = Tracking("project", "exp", [], {}, run_dir=run_dir, total_steps=total_steps)
    tracking.start(steps[0] - 1)
    for step in steps:
        row = {
            "train/loss": float(losses[step - 1]),
            "train/grad_norm": 1.0,
            "progress/pct": 100 * step / NUM_STEPS,
        }
        tracking.log(row, step)
    return tracking


def titles(report):
    return [finding.title for finding in report.findings if finding.rule == "run_complete"]


@pytest.mark.covers("S3.55")
def test_a_run_killed_at_120_of_186_steps_is_not_ok(tmp_path, capsys):
    train(tmp_path, range(1, 121))
    report = judged(tmp_path)
    assert titles(report) == ["The run has completed 120 of 186 steps (64.5%)."]
    assert report.verdict == "ATTENTION" and report.facts["steps"] == "120 of 186"
    assert line(report, "all_steps").status == "fail"
    assert command.main(["--check", "--json", str(tmp_path)]) == 1
    assert '"ATTENTION"' in capsys.readouterr().out


def test_the_same_run_at_its_end_is_ok(tmp_path, capsys):
    train(tmp_path, range(1, 121))
    train(tmp_path, range(101, NUM_STEPS + 1)).finish(0)
    assert (judged(tmp_path).verdict, titles(judged(tmp_path))) == ("OK", [])
    assert command.main(["--check", str(tmp_path)]) == 0


def test_a_resume_that_is_to_train_longer_counts(tmp_path):
    train(tmp_path, range(1, 101), total_steps=100).finish(0)
    assert judged(tmp_path).verdict == "OK"
    train(tmp_path, range(101, 121), total_steps=NUM_STEPS).finish(75)
    assert "The run has completed 120 of 186 steps (64.5%)." in titles(judged(tmp_path))


def test_a_run_that_is_still_training_is_no_reason_for_attention(tmp_path):
    tracking = train(tmp_path, range(1, 121))
    holder = {"nonce": "0", "pid": os.getpid(), "host": socket.gethostname(), "started": "now"}
    write_json(tmp_path / ".train.lock", holder)
    report = judged(tmp_path)
    assert titles(report) == [
        "The run has completed 120 of 186 steps (64.5%) and is still running."
    ]
    assert report.verdict == "OK" and line(report, "all_steps").status == "unknown"
    write_json(tmp_path / ".train.lock", holder | {"host": "elsewhere"})
    assert judged(tmp_path).verdict == "ATTENTION", "no sign of life"
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "rank_0.json").write_text("{}")
    assert judged(tmp_path).verdict == "OK", "a heartbeat just now"
    tracking.finish(0)


def test_a_run_that_was_to_stop_early_is_complete(tmp_path):
    tracking = train(tmp_path, range(1, 121))
    tracking.event("early_stop", 120, "val/loss has not improved in 3 validations; best at step 90")
    tracking.finish(0)
    report = judged(tmp_path)
    assert "stopped early: val/loss has not improved in 3 validations" in titles(report)[0]
    assert report.verdict == "OK" and line(report, "all_steps").status == "unknown"
