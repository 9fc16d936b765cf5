"""Where a trouble began, what to go back to, and what a log alone in its directory does not
prove.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_curves import checkpoints
from report_faults import healthy

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.result import Finding, Report
from trainer.tools.report.run_log import RunLog, Series

STEPS = np.arange(1, 601)


def log_of(**columns: Any) -> RunLog:
    """600 steps of `columns` (`__` for `/`), and a checkpoint every 20."""
    series = {
        key.replace("__", "/"): Series(STEPS, np.asarray(values)) for key, values in columns.items()
    }
    return RunLog(
        Path("run"), "transformers", series, 600, checkpoints=checkpoints(range(20, 601, 20))
    )


def falling_loss(rng: np.random.Generator) -> np.ndarray:
    return np.asarray(1.2 + 1.0 * np.exp(-STEPS / 60) + rng.normal(0, 0.05, 600))


def of_rule(report: Report, rule: str) -> Finding:
    return next(finding for finding in report.findings if finding.rule == rule)


@pytest.mark.parametrize("onset", [200, 260, 300, 400])
@pytest.mark.parametrize("slope", [0.004, 0.01])
def test_a_slow_divergence_is_answered_with_a_checkpoint_from_before_it(onset, slope):
    for seed in range(5):
        losses = falling_loss(np.random.default_rng(seed)) + slope * (STEPS - onset).clip(0)
        report = analyse(log_of(train__loss=losses), profile="sft")
        finding = of_rule(report, "loss_diverging")
        assert finding.steps is not None and abs(finding.steps[0] - onset) <= 15, (
            seed,
            finding.title,
        )
        step = int(finding.remedy.split("checkpoint of step ")[1].split(".")[0])
        assert onset - 60 <= step <= onset, finding.remedy


def state(directory: Path, **facts: Any) -> Path:
    """A healthy `trainer_state.json` of 600 steps, saved every 100, validated every 50."""
    directory.mkdir(parents=True)
    losses = falling_loss(np.random.default_rng(2))
    rows: list[dict[str, Any]] = [
        {
            "step": int(step),
            "loss": float(loss),
            "learning_rate": 1e-5 * (1 - step / 601),
            "grad_norm": 1.0,
        }
        for step, loss in zip(STEPS, losses, strict=True)
    ]
    rows += [
        {"step": step, "eval_loss": 1.3 + 0.5 * float(np.exp(-step / 60))}
        for step in range(50, 601, 50)
    ]
    content = {"max_steps": 600, "save_steps": 100, "eval_steps": 50, "log_history": rows} | facts
    (directory / "trainer_state.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("name", ["logs", "checkpoint-600"])
def test_a_lone_trainer_state_is_a_log_and_no_damaged_checkpoint(tmp_path, name):
    report = analyse(read_run(state(tmp_path / name)))
    assert report.verdict == "OK" and "ckpt_complete" not in str(report.findings), report.findings
    assert report.generalisation is not None and report.generalisation.recommended_path is None


def test_checkpoints_that_a_limit_may_have_removed_are_not_missed(tmp_path):
    run_dir = state(tmp_path / "run")
    for step in (500, 600):
        saved = state(run_dir / f"checkpoint-{step}")
        (saved / "model.safetensors").write_bytes(b"weights")
    assert "ckpt_complete" not in {finding.rule for finding in analyse(read_run(run_dir)).findings}


@pytest.mark.parametrize("share", [0.2, 0.45, 0.6])
def test_a_leak_is_told_from_the_step_at_which_memory_begins_to_grow(share):
    log = healthy("sft")
    sizes = log.series["memory/cpu/rss_gib"]
    at = int(share * len(sizes))
    grown = sizes.values * (1 + 0.4 * (np.arange(len(sizes)) - at).clip(0) / (len(sizes) - at))
    series = {**log.series, "memory/cpu/rss_gib": Series(sizes.steps, grown)}
    finding = of_rule(analyse(replace(log, series=series)), "memory")
    assert finding.steps is not None and abs(finding.steps[0] - int(sizes.steps[at])) <= 20, (
        finding.steps
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_format_hacking_is_told_from_the_step_at_which_the_form_begins_to_rise(
    share,
):
    log, rng = healthy("grpo"), np.random.default_rng(0)
    steps = log.series["kl"].steps
    at = int(share * len(steps))
    forms = 0.3 + 0.6 * (np.arange(len(steps)) - at).clip(0) / (len(steps) - at)
    series = {
        **log.series,
        "rewards/Format/mean": Series(steps, forms + rng.normal(0, 0.03, len(steps))),
        "rewards/AnswerMatchCosine/mean": Series(steps, 0.4 + rng.normal(0, 0.05, len(steps))),
    }
    finding = of_rule(analyse(replace(log, series=series)), "reward_hacking")
    assert (
        finding.steps is not None and abs(finding.steps[0] - int(steps[at])) <= 0.02 * steps[-1]
    ), finding.steps
