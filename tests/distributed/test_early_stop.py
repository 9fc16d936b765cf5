"""A run that no longer gets better on held-out data ends by itself, with its best checkpoint
kept.
"""

from pathlib import Path
from typing import Any

import pytest
import toy_runs
from ranks import run_ranks
from toy import ToySamples, guard_config, write_model_config
from toy_runs import Recipe

from trainer.checkpoint import layout
from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import ValidationBatches
from trainer.errors import EXIT_DONE
from trainer.runtime.distributed import World
from trainer.train.guard import Guard

NUM_STEPS = 40


def train(world: World, run_dir: Path, source: Any) -> tuple[int, list[int], dict[int, float]]:
    """(exit code, steps trained, validations): training samples are learned by heart, held-out
    ones get worse.
    """
    held_out = ToySamples(seed=99)
    plan = RankPlan(world.data_rank, world.num_data_ranks, Limits(None, None), 0.0)
    result = toy_runs.run(
        world,
        run_dir,
        source,
        Recipe(total_steps=NUM_STEPS, save_freq=2, keep=2),
        guard=Guard(guard_config(early_stop_patience=2)),
        test_freq=4,
        validation_batches=ValidationBatches(held_out, plan, batch_size=8),
    )
    validated = {step: row["val/loss"] for step, row in result.rows if "val/loss" in row}
    return result.exit_code, sorted(result.losses), validated


@pytest.mark.covers("S2.36:C", "S3.41:C")
def test_a_run_stops_early_keeps_its_best_checkpoint_and_stays_stopped(tmp_path):
    source, run_dir = write_model_config(tmp_path / "model"), tmp_path / "run"
    (code, steps, validated), (_, others, _) = run_ranks(train, 2, run_dir, source, timeout_s=120)
    assert code == EXIT_DONE and steps == others and steps[-1] == max(validated) < NUM_STEPS
    best_step = min(validated, key=lambda step: validated[step])
    found = [info.step for info in layout.checkpoints(run_dir)]
    assert found == sorted({best_step, steps[-1] - 2, steps[-1]}), "the best, and the newest two"
    again, more_steps, _ = run_ranks(train, 2, run_dir, source, timeout_s=120)[0]
    assert again == EXIT_DONE and more_steps == []
