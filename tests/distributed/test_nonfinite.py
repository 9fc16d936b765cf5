"""A non-finite loss or gradient on one rank: every rank skips the update, counts it, and gives up
in time.
"""

from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from toy import ToySamples, build_toy_model, differing, full_parameters, toy_run
from toy_runs import source as source  # a fixture

from trainer.errors import EXIT_DIVERGED, EXIT_DONE
from trainer.train import fit
from trainer.train.step import training_step


def train_poisoned(world, source, bad_steps, poison, total_steps=6):
    """Rank 1 meets a poisoned micro-batch in `bad_steps`; (exit code, rows, parameters after
    each step).
    """
    model = build_toy_model(world, source)
    parts = toy_run(world, model, ToySamples(), total_steps=total_steps)
    history = []
    plain = model.forward
    step = 0

    def forward(batch):
        output = plain(batch)
        loss = output.loss_sum
        if world.rank == 1 and step in bad_steps:
            # a NaN loss has NaN gradients; a gradient alone can overflow behind a finite loss
            loss = (
                loss * float("nan")
                if poison == "loss"
                else loss + (loss - loss.detach()) * 1e39 * 1e39
            )
        return output._replace(loss_sum=loss)

    model.forward = forward

    def recorded(run, batch):
        nonlocal step
        step = batch.step
        result = training_step(run, batch)
        history.append(full_parameters(model))
        return result

    with patch.object(fit, "training_step", recorded):
        code = fit.fit(parts)
    return code, parts.tracking.rows, history


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_one_bad_step_is_skipped_by_all(source, poison):
    for code, rows, history in run_ranks(train_poisoned, 2, source, {3}, poison):
        assert code == EXIT_DONE
        assert not differing(history[2], history[1]), "the poisoned step changed parameters"
        assert differing(history[3], history[2]) and all(
            torch.isfinite(v).all() for v in history[5].values()
        )
        assert [row["optim/skipped_steps"] for _, row in rows] == [0, 0, 1, 1, 1, 1]
        shown = rows[2][1]["train/loss" if poison == "loss" else "train/grad_norm"]
        assert not torch.isfinite(torch.tensor(shown)), "the bad value is hidden"


def test_too_many_in_a_row_is_76(source):
    for code, rows, history in run_ranks(train_poisoned, 2, source, {2, 3, 4, 5, 6, 7}, "loss", 8):
        assert code == EXIT_DIVERGED
        assert len(rows) == 6, "five in a row are the limit"
        assert not differing(history[5], history[0])
