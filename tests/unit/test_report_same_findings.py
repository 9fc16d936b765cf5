"""The same curves written by different trainers are the same run: equal findings, anomalies and
advice.
"""

import numpy as np
import pytest
from log_formats import WRITERS

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import Series

NUM_STEPS, SPIKE, SEED = 400, slice(248, 256), 4
EPOCHS_ONLY = {"csv"}
"""Histories of epochs; the other formats have a row per step."""


def overfitting_run_with_a_burst() -> dict[str, Series]:
    """The loss falls, the held-out one rises from step 200 on; at step 249 loss and gradient
    burst.
    """
    generator = np.random.default_rng(SEED)
    steps, evals = np.arange(1, NUM_STEPS + 1), np.arange(50, NUM_STEPS + 1, 50)
    loss = 0.2 + 1.6 * np.exp(-steps / 120) + generator.normal(0, 0.01, NUM_STEPS)
    norm = np.exp(generator.normal(0, 0.2, NUM_STEPS))
    loss[SPIKE] *= 6
    norm[SPIKE] *= 80
    held_out = 1.0 + 0.8 * np.exp(-evals / 80) + np.clip((evals - 200) / 400, 0, None) ** 1.2
    curves = {
        "train/loss": (steps, loss),
        "train/grad_norm": (steps, norm),
        "train/lr": (
            steps,
            1e-4 * np.minimum(1, steps / 20) * 0.5 * (1 + np.cos(np.pi * steps / (NUM_STEPS + 1))),
        ),
        "val/loss": (evals, held_out),
    }
    exact = {
        key: (at, values.astype(np.float32).astype(np.float64))
        for key, (at, values) in curves.items()
    }
    return {key: Series(at.astype(np.int64), values) for key, (at, values) in exact.items()}


def told(report: Report) -> dict[str, object]:
    """What is said of the curves themselves, not of the file they came from."""
    about = {"train/loss", "train/grad_norm", "train/lr", "val/loss"}
    general = report.generalisation
    assert general is not None
    return {
        "findings": [
            (f.id, f.level, f.title, f.steps) for f in report.findings if f.metric in about
        ],
        "anomalies": [
            (a.steps, a.metric, a.peak_step, [m.metric for m in a.movers], a.chain)
            for a in report.anomalies
        ],
        "checkpoint": (general.best_step, general.overfit_step, general.recommended_step),
        "rate": report.learning_rate
        and (report.learning_rate.schedule, report.learning_rate.warmup_steps),
    }


@pytest.mark.covers("S3.43", "S2.21")
def test_twelve_formats_give_identical_findings(tmp_path):
    curves, found = overfitting_run_with_a_burst(), {}
    for name, write in WRITERS.items():
        if name not in EPOCHS_ONLY:
            (tmp_path / name).mkdir()
            log = write(tmp_path / name, curves)
            # what it was started with is another evidence
            (tmp_path / name / "args.json").unlink(missing_ok=True)
            found[name] = told(analyse(read_run(log), profile="sft"))
    assert len(found) >= 6
    reference = found["fsdp-sft"]
    assert [steps for steps, *_ in reference["anomalies"]] == [(249, 256)]  # type: ignore[misc, union-attr]
    assert {finding[0].split(":")[0] for finding in reference["findings"]} >= {
        "loss_spike",
        "overfit",
    }  # type: ignore[union-attr]
    assert {name: told for name, told in found.items() if told != reference} == {}
