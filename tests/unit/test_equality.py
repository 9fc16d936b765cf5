"""Comparison of two finished runs: equal in every bit, or each difference is named with its place."""

import math
import random
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoint_fakes import rewrite_manifest
from ranks import run_ranks
from small_files import flip
from toy_runs import Recipe, run
from toy_runs import source as source  # fixture
from whole_equality import compare_runs

from trainer.checkpoint import layout
from trainer.tools.verify import training
from trainer.tools.verify.runs import ShortRun
from trainer.tracking.metrics_file import FILE_NAME, MetricsFile, MetricsRow

STEPS = 6
LAST = layout.step_dir_name(STEPS)


def values_of(step):
    """Return the compared metrics of a step, and one that differs between runs."""
    values = {"train/loss": 1 / step, "train/grad_norm": 0.1 * step, "train/lr(1e-3)": 1e-3 / 3}
    return {**values, "train/total_token_count": 100 + step, "train/time(s)": random.random()}


def log(run_dir, step, **changes):
    """Log a step, which may replace an earlier attempt."""
    metrics = MetricsFile(run_dir / FILE_NAME)
    values = values_of(step) | {f"train/{name}": value for name, value in changes.items()}
    metrics.write(MetricsRow.of(values, step))
    metrics.close()


@pytest.fixture(scope="module")
def finished(source, root):
    """A run of two ranks with a checkpoint of its last step."""
    run_dir = root / "run"
    run_ranks(run, 2, run_dir, source, Recipe(total_steps=STEPS, save_freq=-1))
    for step in range(1, STEPS + 1):
        log(run_dir, step)
    return run_dir


@pytest.fixture
def runs(finished, tmp_path):
    left, right = (tmp_path / name for name in ("straight", "resumed"))
    for run_dir in (left, right):
        shutil.copytree(finished, run_dir)
    return left, right


def differences(runs):
    return compare_runs(*runs, steps=STEPS).differences


def change_data(checkpoint, **changes):
    """Change entries of `data.pt`."""
    path = checkpoint / layout.DATA
    torch.save({**torch.load(path, weights_only=True), **changes}, path)

    def update_size(tree):
        for record in tree["files"]:
            if record["path"] == layout.DATA:
                record["size_bytes"] = path.stat().st_size

    rewrite_manifest(checkpoint, update_size)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_wrong_resume_and_random_sums_are_told_apart(
    finished, runs, tmp_path, monkeypatch, is_random
):
    straight, killed = (ShortRun(run_dir) for run_dir in runs)
    again = ShortRun(Path(shutil.copytree(finished, tmp_path / "again")))
    for run_of in (killed, *[again] * is_random):
        log(run_of.run_dir, 1, loss=9.0)
    monkeypatch.setattr(training, "NUM_STEPS", STEPS)
    three = Mock(straight=straight)
    three.train_killed.return_value = killed, 4, 4
    three.train.return_value = again
    found = training.check_resume(three)
    what, fix = (
        ("not deterministic", "trainer.deterministic") if is_random else ("first at step 1", "")
    )
    assert found.level == "fail" and what in found.what and fix in found.fix


def test_equal_runs_have_no_difference(runs):
    """Files left by a reader, torchdata's counters and a repeated attempt do not count as
    differences.
    """
    (runs[1] / f".reading_{LAST}").touch()
    log(runs[1], 3, loss=9.0)
    log(runs[1], 3)
    for number, run_dir in enumerate(runs):
        log(run_dir, 2, loss=math.nan, grad_norm=math.inf)
        change_data(run_dir / LAST, loader={"yielded": number})
    found = compare_runs(*runs, steps=STEPS)
    assert found.differences == [] and found.num_equal > 4 * STEPS + 100


@pytest.mark.parametrize("key", ["loss", "total_token_count"])
def test_the_last_bit_of_a_step_counts(runs, key):
    value = values_of(3)[f"train/{key}"]
    changed = value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)
    log(runs[1], 3, **{key: changed})
    assert differences(runs) == [f"step 3, train/{key}: {value!r} and {changed!r}"]


CHANGES = {
    r"model_world_size_2_rank_1\.pt, model\.\S+: numbers differ": (
        lambda path: flip(path / layout.model_file(2, 1))
    ),
    r"optim_world_size_2_rank_0\.pt, state\.\S+: numbers differ": (
        lambda path: flip(path / layout.optim_file(2, 0))
    ),
    r"data\.pt, epoch: \d and 7": lambda path: change_data(path, epoch=7),
    "ranks: 2 and 1": lambda path: rewrite_manifest(path, lambda tree: tree.update(world_size=1)),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_the_final_state_is_compared_in_every_bit(runs, expected):
    CHANGES[expected](runs[1] / LAST)
    found = differences(runs)
    assert re.match(f"{LAST}, {expected}", found[0])
    assert len(found) == 1 or "ranks" in expected
