"""The checklist while a run goes on: what fails is said once, at step 100 and at each save."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config import Config, TrainerConfig
from trainer.report import judge as report_checklist
from trainer.report.rule_table import default_limits
from trainer.run import monitoring
from trainer.run.monitoring import make_tracking
from trainer.tracking import Tracking
from trainer.tracking.events_file import read_events

SAVED = {"ckpt/save_s": 0.1, "ckpt/age_steps": 1}
RNG = np.random.default_rng(0)
FLAT = 1.5 + 0.05 * RNG.standard_normal(1000)
FALLING = FLAT + np.exp(-np.arange(1000) / 100)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SETTLE_S", 0.0)


def begin(run_dir: Path, *, step: int = 0, total_steps: int = 300) -> Tracking:
    names = {"project_name": "p", "experiment_name": "e", "run_group": "g"}
    config = Config(trainer=TrainerConfig(**names, default_local_dir=str(run_dir), logger=[]))
    tracking = make_tracking(config, total_steps=total_steps)
    tracking.start(step)
    return tracking


def train(tracking: Tracking, steps: range, losses: Any = FALLING, **more: float) -> None:
    for step in steps:
        rate = min(step / 10, 1) * 0.01
        row = {"train/loss": float(losses[step]), "train/grad_norm": 1.0, "train/lr(1e-3)": rate, **more}
        tracking.log(row, step)


def save(run_dir: Path, step: int) -> Path:
    """A checkpoint of one file, the newest."""
    path = run_dir / f"global_step_{step}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(b"weights")
    (path / "manifest.json").write_text(json.dumps({"files": [{"path": "model.pt", "size_bytes": 7}]}))
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


def said(run_dir: Path) -> list[tuple[int, str, str]]:
    events = [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "checklist"]
    return [(event["step"], event["line"], event["level"]) for event in events]


@pytest.mark.covers("S3.45", "S3.50")
def test_what_fails_in_the_first_hundred_steps_is_said_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_limits()["first_steps"] == monitoring.FIRST_STEPS
    tracking = begin(tmp_path)
    train(tracking, range(1, 100), FLAT)
    assert said(tmp_path) == []
    train(tracking, range(100, 101), FLAT)
    train(tracking, range(101, 300), FLAT, **{"system/gpu_util": 3.0})
    tracking.finish(0)
    assert said(tmp_path) == [(100, "loss_falls", "warn")]
    assert "step 100: checklist: The loss does not fall over the first 100 steps (p = " in caplog.text
    assert "Try optim.lr three times higher and lower" in caplog.text
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "end"
    assert json.loads((tmp_path / "run.json").read_text())["group"] == "g", "its evaluations take it from there"


def test_nothing_is_said_of_a_run_in_order_nor_of_one_that_is_short_or_still_warming_up(tmp_path: Path) -> None:
    healthy, short, warming = (begin(tmp_path / name) for name in ("healthy", "short", "warming"))
    train(healthy, range(1, 300))
    train(short, range(1, 60), FLAT)
    for step in range(1, 150):
        warming.log({"train/loss": float(FLAT[step]), "train/lr(1e-3)": step * 1e-4}, step)
    for name, tracking in (("healthy", healthy), ("short", short), ("warming", warming)):
        save(tmp_path / name, 40)
        tracking.log(SAVED, 300, kind="end")
        tracking.finish(0)
        assert said(tmp_path / name) == []


def test_a_save_that_lacks_files_is_said_until_it_is_in_order_and_not_again_after_a_restart(tmp_path: Path) -> None:
    tracking = begin(tmp_path)
    file = save(tmp_path, 10) / "model.pt"
    train(tracking, range(1, 11))
    file.unlink()
    train(tracking, range(11, 12), **SAVED)
    while not said(tmp_path):  # by the thread that looks, before there is another checkpoint to compare with
        time.sleep(0.01)
    save(tmp_path, 20)
    train(tracking, range(12, 22), **SAVED)
    tracking.finish(75)
    assert said(tmp_path) == [(10, "checkpoints_whole", "warn")]
    tracking = begin(tmp_path, step=20)
    train(tracking, range(21, 22), **SAVED)
    tracking.finish(75)
    assert len(said(tmp_path)) == 1
    file.write_bytes(b"weights")
    tracking = begin(tmp_path, step=21)
    train(tracking, range(22, 23), **SAVED)
    tracking.finish(75)
    file.unlink()
    tracking = begin(tmp_path, step=22)
    tracking.log(SAVED, 31, kind="end")  # as the save is told that a run ends with
    tracking.finish(0)
    levels = [level for _, line, level in said(tmp_path) if line == "checkpoints_whole"]
    assert levels == ["warn", "info", "warn"]


@pytest.mark.covers("S3.51")
@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_rising_validation_is_said_at_the_next_save_unless_it_was_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_rolled_back: bool
) -> None:
    tracking = begin(tmp_path)
    for turn, loss in enumerate([2.0, 1.5, 1.4, 1.6, 1.8, 2.0], 1):
        train(tracking, range(100 * turn - 99, 100 * turn + 1))
        tracking.log({"val/loss": loss}, 100 * turn)
        save(tmp_path, 100 * turn)
    if is_rolled_back:
        tracking.rewind(300)
    train(tracking, range(301, 302) if is_rolled_back else range(601, 602), **SAVED)
    tracking.finish(75)
    assert [line for _, line, _ in said(tmp_path)] == ([] if is_rolled_back else ["val_not_rising"])
    assert is_rolled_back or "Stop training and take the checkpoint of step 300." in caplog.text


def test_what_another_row_of_the_rule_tells_is_said_in_its_words(tmp_path: Path) -> None:
    tracking = begin(tmp_path)
    train(tracking, range(1, 50), **{"train/time(s)": 1.0})
    train(tracking, range(50, 102), **{"train/time(s)": 2.0})
    tracking.finish(75)
    (event,) = (event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "checklist")
    assert event["message"].startswith("checklist: Training gets 2 times slower after step")
    assert "Compare sequence lengths, memory and device clocks" in event["message"]


def test_a_checklist_that_breaks_costs_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise KeyError("a rule")

    monkeypatch.setattr(report_checklist, "judge", broken)
    tracking = begin(tmp_path)
    train(tracking, range(1, 300), FLAT)
    tracking.finish(0)
    assert "'checklist' dropped: log() raised KeyError: 'a rule'; training goes on" in caplog.text
    assert [record.levelno for record in caplog.records if record.levelno > logging.WARNING] == []
