"""Two sources with a chat template each, and turns apart: resumed inside an epoch bit-equal,
measured one by one on any ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from source_files import answers, chats, words, write_sources
from test_seams import StopsAfter
from toy import write_model_config
from toy_runs import Recipe, Result, run

from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import ValidationBatches
from trainer.errors import EXIT_RESUMABLE
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import Inputs, prepare_inputs

STEPS, LOSS_BY = 4, ("train/loss_by/chats", "train/loss_by/answers")


def inputs_of(files: Path) -> Inputs:
    mix = words(files, chats(files, ",repeat:1.5"), answers(files, ",repeat:1.5"))
    return prepare_inputs(
        load_config([*mix, "data.val_ratio=0.2", "data.turns=apart"]), progress=lambda: None
    )


def train(world: Any, run_dir: Path, source: Any, files: Path, num_steps: int = 99) -> Result:
    inputs = inputs_of(files)
    assert inputs.validation is not None
    plan = RankPlan(world.data_rank, world.num_data_ranks, Limits(None, None), 0.0)
    return run(
        world,
        run_dir,
        source,
        Recipe(total_steps=STEPS, save_freq=-1),
        stop=StopsAfter(num_steps),
        samples=inputs.train,
        max_tokens=96,
        validation_batches=ValidationBatches(inputs.validation, plan, batch_size=2),
    )


def train_in_parts(
    world: Any, run_dir: Path, source: Any, files: Path
) -> tuple[Result, int, Result]:
    """(A run, the exit code of one that is stopped after two steps, what continues that)."""
    straight = train(world, run_dir / "straight", source, files)
    stopped = train(world, run_dir / "parted", source, files, 2)
    return straight, stopped.exit_code, train(world, run_dir / "parted", source, files)


def test_two_sources_resume_inside_an_epoch_bit_equal_and_are_measured_one_by_one(
    tmp_path,
):
    write_sources(tmp_path)
    inputs = inputs_of(tmp_path)
    source = write_model_config(tmp_path / "model", vocab_size=len(inputs.tokenizer))
    assert sum(share.num_samples for share in inputs.train.shares) == 15 + 9, "an epoch has 3 steps"
    straight, exit_code, resumed = run_ranks(train_in_parts, 2, tmp_path, source, tmp_path)[0]
    assert exit_code == EXIT_RESUMABLE
    assert resumed.start_step == 2
    assert resumed.losses == {step: straight.losses[step] for step in (3, 4)}
    for name, value in straight.parameters.items():
        assert torch.equal(resumed.parameters[name], value)

    rows = {step: row for step, row in straight.rows if "train/loss" in row}
    for step, row in resumed.rows:
        assert all(row[key] == rows[step][key] for key in LOSS_BY if "train/loss" in row)
    (one_rank,) = run_ranks(train, 1, tmp_path / "one", source, tmp_path)
    assert len(one_rank.rows) == len(straight.rows)
    for (_, ours), (_, theirs) in zip(one_rank.rows, straight.rows, strict=True):
        keys = [key for key in theirs if key in ("train/loss", "val/loss") or "/loss_by/" in key]
        assert {key: ours[key] for key in keys} == pytest.approx(
            {key: theirs[key] for key in keys}, rel=1e-6
        )
    (validated,) = (row for _, row in straight.rows if "val/loss" in row)
    assert {"val/loss_by/chats", "val/loss_by/answers"} <= validated.keys()
