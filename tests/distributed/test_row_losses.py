"""Losses of rows equal those of plain transformers and add up to the loss of the step. The report
names rows that stand out.
"""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small_files import write_lines
from toy import (
    ToySamples,
    build_toy_model,
    full_parameters,
    plain_loss,
    toy_run,
    write_model_config,
)
from transformers import AutoConfig, AutoModelForCausalLM
from whole_runs import tiny_model, train

from trainer.data.batch_plan import Share
from trainer.tools.report.readers import read_run
from trainer.tracking.row_losses import read_hard_rows
from trainer.train.fit import fit

STEPS = 6
# the second source comes one and a half times: some samples are in a batch twice
SHARES = (Share(18), Share(6, repeat=3.0))


def losses_of_steps(world, path):
    """(parameters before the first step, (losses of the samples, loss) of each step)."""
    model = build_toy_model(world, write_model_config(path / str(world.rank)))
    parts = toy_run(world, model, ToySamples(shares=SHARES), total_steps=3, max_tokens=80)
    recorder = parts.tracking
    begun_with = full_parameters(model)
    assert fit(parts) == 0
    losses = recorder.column("train/loss")
    return begun_with, list(zip(recorder.samples.values(), losses, strict=True))


def test_they_are_equal_on_any_number_of_ranks_and_add_up(tmp_path):
    ((begun_with, expected),) = run_ranks(losses_of_steps, 1, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "0")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(begun_with, strict=False)
    samples, (first, _) = ToySamples(shares=SHARES), expected[0]
    for sample_id, num_tokens, loss_sum in zip(
        first.ids, first.tokens, first.loss_sums, strict=True
    ):
        times = num_tokens / samples.num_loss_tokens[sample_id]
        with torch.no_grad():
            alone = float(plain_loss(model, samples, [sample_id]))
        assert loss_sum == pytest.approx(times * alone, rel=1e-5)
    for _, found in run_ranks(losses_of_steps, 4, tmp_path):
        for (losses, loss), (whole, _) in zip(found, expected, strict=True):
            assert losses.ids == whole.ids
            np.testing.assert_array_equal(losses.tokens, whole.tokens)
            np.testing.assert_allclose(losses.loss_sums, whole.loss_sums, rtol=1e-5)
            assert losses.loss_sums.sum() / losses.tokens.sum() == pytest.approx(loss, rel=1e-9)


def test_the_report_names_the_row_that_stands_out(tmp_path):
    plain, odd = ({"instruction": "say a", "output": answer} for answer in ("a a a", "Zq?9"))
    file = write_lines(tmp_path / "rows.jsonl", [*[plain] * 16, odd, *[plain] * 7])
    run_dir = tmp_path / "run"
    words = (
        *tiny_model(tmp_path),
        f"data.train_files={file}",
        "data.val_ratio=0",
        "data.train_batch_size=12",
        "trainer.total_training_steps=12",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
        "optim.lr=0.01",
    )
    train(run_dir, 2, *words)
    log = read_run(run_dir)
    assert log.hard_rows[0].place == f"{file}:17" and log.hard_rows[0].excess > 0
    _, hardest = read_hard_rows(run_dir / "row_losses.jsonl", limit=3)
    assert any(place == f"{file}:17" for step in (9, 10, 11, 12) for place, _ in hardest[step])
