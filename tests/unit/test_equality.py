"""Compare two finished runs: equal in every bit, or each difference named with its place."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoint_fakes import WORLD_SIZE
from finished_runs import (
    NAMES,
    STEPS,
    data_state,
    rank_states,
    rewrite_checkpoint,
    row,
    write_run,
)
from whole_equality import compare_runs

from trainer.checkpoint import layout
from trainer.tools.verify import training
from trainer.tools.verify.runs import ShortRun
from trainer.tracking.metrics_file import FILE_NAME, MetricsFile, MetricsRow

States = list[dict[str, dict[str, Any]]]
LAST = layout.step_dir_name(STEPS)
MODEL, OPTIM = (f"{LAST}, {part}_world_size_2_rank_" for part in ("model", "optim"))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    return write_run(tmp_path / "straight"), write_run(tmp_path / "resumed")


def differences(runs: tuple[Path, Path]) -> list[str]:
    return compare_runs(*runs, steps=STEPS).differences


def log_again(run_dir: Path, step: int, **changes: float) -> None:
    """Log a newer attempt of one step, with other values."""
    metrics = MetricsFile(run_dir / FILE_NAME)
    values = row(step) | {f"train/{name}": value for name, value in changes.items()}
    metrics.write(MetricsRow.of(values, step))
    metrics.close()


def change_state(run_dir: Path, change: Callable[[States, dict[str, Any]], object]) -> None:
    """Save the final state again after `change(states of the ranks, data.pt)`."""
    states = rank_states()
    data = data_state(0)
    with torch.no_grad():
        change(states, data)
    rewrite_checkpoint(run_dir, states, data)


def moment(states: States, rank: int) -> torch.Tensor:
    return states[rank]["optim"]["state"][NAMES[1]]["exp_avg"]._local_tensor


def weight(states: States, rank: int) -> torch.Tensor:
    return states[rank]["model"][NAMES[0]]._local_tensor


@pytest.mark.parametrize("is_random", [False, True])
def test_a_wrong_resume_and_random_sums_are_told_apart(runs, tmp_path, monkeypatch, is_random):
    straight, killed = (ShortRun(run_dir) for run_dir in runs)
    again = ShortRun(write_run(tmp_path / "again"))
    for run in (killed, *[again] * is_random):
        log_again(run.run_dir, 1, loss=9.0)
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
    """Files that a reader leaves, and an attempt that was repeated, are no difference."""
    (runs[1] / f".reading_{LAST}").touch()
    log_again(runs[1], 3, loss=9.0)
    log_again(runs[1], 3)
    for run_dir in runs:
        log_again(run_dir, 2, loss=math.nan, grad_norm=math.inf)
    num_tensors = WORLD_SIZE * (len(NAMES) + 1 + 2 * len(NAMES))
    found = compare_runs(*runs, steps=STEPS)
    assert found.differences == [] and found.num_equal > STEPS * 4 + num_tensors


def next_value(value: float) -> float:
    return value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)


LOGGED = {f"step 3, train/{key}": key for key in ("loss", "total_token_count")}


@pytest.mark.parametrize("place", LOGGED)
def test_the_last_bit_of_a_step_counts(runs, place):
    value = row(3)[f"train/{LOGGED[place]}"]
    log_again(runs[1], 3, **{LOGGED[place]: next_value(value)})
    assert differences(runs) == [f"{place}: {value!r} and {next_value(value)!r}"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda states, data: moment(states, 1).view(-1)[5:7].add_(0.5),
            f"{OPTIM}1.pt, state.norm.weight.exp_avg: .* at most 0.5",
        ),
        (
            lambda states, data: weight(states, 0)[1, 1].fill_(math.nan),
            f"{MODEL}0.pt, embed.weight: .* at most nan",
        ),
        (
            lambda states, data: states[0]["model"].pop("empty"),
            f"{MODEL}0.pt, empty: .* and missing",
        ),
        (lambda states, data: data.update(epoch=1), f"{LAST}, data.pt, epoch: 0 and 1"),
        (lambda states, data: states.pop(), f"{LAST}, ranks: 2 and 1"),
    ],
)
def test_the_final_state_is_compared_in_every_bit(runs, change, expected):
    change_state(runs[1], change)
    found = differences(runs)
    assert re.match(expected, found[0])
    assert len(found) == 1 or "ranks" in expected
