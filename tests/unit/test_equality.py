"""Comparing two finished runs: equal in every bit, or each difference named with its place."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fakes import WORLD_SIZE
from finished_runs import (
    NAMES,
    STEPS,
    data_state,
    process_group,
    rank_state,
    rewrite_checkpoint,
    row,
    write_run,
)
from whole_equality import compare_runs

from trainer.checkpoint import layout
from trainer.tools.verify.equality import Comparison
from trainer.tracking.metrics_file import FILE_NAME, MetricsFile, MetricsRow

States = list[dict[str, dict[str, Any]]]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    return write_run(tmp_path / "straight"), write_run(tmp_path / "resumed")


def compare(runs: tuple[Path, Path]) -> Comparison:
    return compare_runs(*runs, steps=STEPS)


def log_again(run_dir: Path, step: int, **changes: float) -> None:
    """A newer attempt of one step, with other values."""
    metrics = MetricsFile(run_dir / FILE_NAME)
    metrics.write(
        MetricsRow.of(row(step) | {f"train/{name}": value for name, value in changes.items()}, step)
    )
    metrics.close()


def change_state(run_dir: Path, change: Callable[[States, dict[str, Any]], object]) -> None:
    """Save the final state anew after `change(states of the ranks, data.pt)`."""
    with process_group():
        states, data = [rank_state(rank) for rank in range(WORLD_SIZE)], data_state(0)
        with torch.no_grad():
            change(states, data)
    rewrite_checkpoint(run_dir, states, data)


def moment(states: States, rank: int) -> torch.Tensor:
    return states[rank]["optim"]["state"][NAMES[1]]["exp_avg"]._local_tensor


def weight(states: States, rank: int) -> torch.Tensor:
    return states[rank]["model"][NAMES[0]]._local_tensor


def test_equal_runs_have_no_difference(runs):
    num_tensors = WORLD_SIZE * (len(NAMES) + 1 + 2 * len(NAMES))
    found = compare(runs)
    assert found.differences == [] and found.num_equal > STEPS * 4 + num_tensors


def test_what_readers_and_a_shortcut_leave_after_the_end_is_no_difference(
    runs,
):
    """A run that was killed once it had ended has no record for the next start, which looks
    itself then.
    """
    (runs[1] / f".reading_{layout.step_dir_name(STEPS)}").touch()
    assert compare(runs).differences == []
    (runs[1] / ".staging_x").mkdir()
    (difference,) = compare(runs).differences
    assert difference.startswith("what else the directory holds")


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr(1e-3)", "total_token_count"])
def test_the_last_bit_of_a_step_counts(runs, key):
    value = row(3)[f"train/{key}"]
    other = value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)
    log_again(runs[1], 3, **{key: other})
    found = compare(runs)
    assert found.differences == [f"step 3, train/{key}: {value!r} and {other!r}"]


def test_differences_come_in_the_order_of_the_run(runs):
    change_state(runs[1], lambda states, data: data.update(samples_consumed=40))
    log_again(runs[1], 5, loss=2.0)
    log_again(runs[1], 4, loss=1.0)
    assert [text.split(":")[0] for text in compare(runs).differences] == [
        "step 4, train/loss",
        "step 5, train/loss",
        f"global_step_{STEPS}, data.pt, samples_consumed",
    ]


def test_the_newest_attempt_of_a_step_counts(runs):
    log_again(runs[1], 3, loss=9.0)
    log_again(runs[1], 3)
    assert compare(runs).differences == []


def test_steps_that_were_skipped_alike_are_equal(runs):
    for run_dir in runs:
        log_again(run_dir, 2, loss=math.nan, grad_norm=math.inf)
    assert compare(runs).differences == []
    log_again(runs[1], 2, loss=0.5, grad_norm=math.inf)
    assert compare(runs).differences == ["step 2, train/loss: nan and 0.5"]


def test_a_missing_step_is_a_difference_even_in_both(runs):
    def drop(run_dir: Path) -> None:
        lines = (run_dir / FILE_NAME).read_text().splitlines(keepends=True)
        (run_dir / FILE_NAME).write_text("".join(lines[:1] + lines[2:]))

    drop(runs[1])
    assert compare(runs).differences[0] == f"step 2, train/loss: {row(2)['train/loss']} and missing"
    drop(runs[0])
    assert compare(runs).differences[0] == "step 2, train/loss: missing and missing"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda states, data: moment(states, 1).view(-1)[5:7].add_(0.5),
            "optim_world_size_2_rank_1.pt, state.norm.weight.exp_avg: numbers differ, by at most 0.5",
        ),
        (
            lambda states, data: weight(states, 0)[1, 1].fill_(math.nan),
            "model_world_size_2_rank_0.pt, embed.weight: numbers differ, by at most nan",
        ),
        (
            lambda states, data: states[0]["model"].pop("empty"),
            "model_world_size_2_rank_0.pt, empty: float32 (0, 3), of which (0, 3) here and missing",
        ),
        (
            lambda states, data: states[0]["model"].update({NAMES[0]: torch.zeros(5, 3)}),
            "model_world_size_2_rank_0.pt, embed.weight: float32 (4, 3), of which (4, 3) here and "
            "float32 (5, 3), of which (5, 3) here",
        ),
        (
            lambda states, data: states[1]["optim"]["param_groups"][0].update(lr=0.2),
            "optim_world_size_2_rank_1.pt, param_groups.0.lr: 0.1 and 0.2",
        ),
        (lambda states, data: data.update(epoch=1), "data.pt, epoch: 0 and 1"),
        (lambda states, data: states.pop(), "ranks: 2 and 1"),
    ],
)
def test_the_final_state_is_compared_in_every_bit(runs, change, expected):
    change_state(runs[1], change)
    found = compare(runs)
    place, _, difference = found.differences[0].partition(f"global_step_{STEPS}")
    assert place == "" and difference.lstrip(",: ") == expected
    assert len(found.differences) == 1 or expected.startswith("ranks")


def test_minus_zero_is_not_zero(runs):
    change_state(runs[0], lambda states, data: weight(states, 1).zero_())
    change_state(runs[1], lambda states, data: weight(states, 1).zero_().neg_())
    assert "numbers differ, by at most 0" in compare(runs).differences[0]


def test_an_incomplete_checkpoint_is_a_difference_even_in_both(runs):
    place = Path(layout.step_dir_name(STEPS), layout.DATA)
    size_bytes = (runs[0] / place).stat().st_size
    for run_dir in runs:
        (run_dir / place).write_bytes(b"")
    reason = f"data.pt has 0 bytes, {size_bytes} were written"
    assert compare(runs).differences == [f"global_step_{STEPS}: {reason} and {reason}"]


@pytest.mark.parametrize(
    "name", [layout.optim_file(WORLD_SIZE, 0), layout.model_file(WORLD_SIZE, 1), layout.DATA]
)
def test_a_file_that_cannot_be_read_is_a_difference(runs, name):
    file = runs[1] / layout.step_dir_name(STEPS) / name
    file.write_bytes(bytes(file.stat().st_size))
    difference, *_ = compare(runs).differences
    assert difference.startswith(f"global_step_{STEPS}, {name}: ") and str(file) in difference
