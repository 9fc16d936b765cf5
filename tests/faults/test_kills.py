"""The short form of kills.py: kills and preemptions at random moments of real runs lose, change
and leave nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
from kills import TOTAL_STEPS, Campaign, Run, check, different_checkpoints
from sweeps import short_or_full
from whole_equality import compare_runs

from trainer.checkpoint import layout
from trainer.checkpoint.lock import LOCK
from trainer.errors import EXIT_DONE

SEED = 7
STRIKES = short_or_full({"kill": 4, "preempt": 2}, full={"kill": 8, "preempt": 4})


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=SEED)


def test_nothing_is_lost_by_kills_and_preemptions(campaign):
    campaign.run_all(STRIKES)
    assert campaign.faults == [], f"seed {SEED}"


@pytest.mark.parametrize("forgets_names", [False, True])
def test_nothing_is_lost_by_power_cuts_unless_the_disk_forgets_names(tmp_path, forgets_names):
    command = [sys.executable, kills.__file__, "--power-cuts", "3", "--seed", "1", "--output"]
    environment = {**os.environ, "DISK_FORGETS_NAMES": "1"} if forgets_names else None
    done = subprocess.run(
        [*command, tmp_path / "result.json"],
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == int(forgets_names), done.stdout + done.stderr
    faults = json.loads((tmp_path / "result.json").read_text())["faults"]
    assert any("checkpoint" in fault for fault in faults) == forgets_names, faults


def replaced(before: str, after: str) -> Callable[[Path], object]:
    def replace(run_dir: Path) -> None:
        metrics = run_dir / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace(before, after, 1))

    return replace


def lose_validation(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(
        "".join(line for line in lines if not ('"kind":"val"' in line and '"step":3,' in line))
    )


def damage(run_dir: Path) -> None:
    data = run_dir / layout.step_dir_name(TOTAL_STEPS) / layout.DATA
    data.write_bytes(data.read_bytes()[:-1] + b"?")


def shorten_history(run_dir: Path) -> None:
    history = run_dir / "training_history.csv"
    history.write_text(history.read_text().splitlines(keepends=True)[0])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "diverged": (replaced('"train/loss":8', '"train/loss":9'), "diverged: train/loss"),
    "another number": (
        replaced('"data/token_imbalance":', '"ckpt/x":'),
        "diverged: data/token_imbalance None instead of",
    ),
    "lost": (
        lambda run_dir: (run_dir / layout.step_dir_name(TOTAL_STEPS)).rename(run_dir / ".trash_x"),
        "announced",
    ),
    "damaged": (damage, "is not whole"),
    "validation lost": (lose_validation, "validation of step 3, val/loss"),
    "history ends early": (shorten_history, "training_history.csv"),
    "pointer older": (
        lambda run_dir: (run_dir / layout.POINTER).write_text("3"),
        "step to continue from",
    ),
    "no report": (
        lambda run_dir: (run_dir / "report.html").unlink(),
        "what else the directory holds",
    ),
    "left over": (
        lambda run_dir: (run_dir / ".staging_x").mkdir(),
        "what else the directory holds",
    ),
    "no end": (lambda run_dir: (run_dir / "events.jsonl").write_text(""), "exit code in its log"),
    "lock left": (lambda run_dir: (run_dir / LOCK).write_text("{}"), "lock given back"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_campaign_can_tell(campaign, tmp_path, fault):
    """The checks of a trial name the one fault of a finished run."""
    fresh = campaign.new_run(1)
    run_dir = tmp_path / fresh.straight.name
    shutil.copytree(fresh.straight, run_dir)
    current = Run(run_dir, fresh.world_size, fresh.words, fresh.straight)
    log = fresh.straight.with_suffix(".log").read_text().replace(str(fresh.straight), str(run_dir))
    current.log.write_text(log)

    def found() -> list[str]:
        differences = compare_runs(current.straight, run_dir, steps=TOTAL_STEPS).differences
        return [*check(current, EXIT_DONE, ""), *differences, *different_checkpoints(current)]

    assert found() == []
    harm, named = FAULTS[fault]
    harm(run_dir)
    assert any(named in text for text in found()), found()
