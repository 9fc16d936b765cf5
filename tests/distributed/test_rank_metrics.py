"""Metrics on several ranks: a metric that only this file defines, and the times of every rank."""

import math
import time
from unittest.mock import patch

import pytest
from ranks import run_ranks
from toy import ToySamples, build_toy_model, full_parameters, toy_run
from toy_runs import source as source  # a fixture

from trainer.model.losses import LOSSES, Loss, cross_entropy
from trainer.optim import clip
from trainer.tracking import Tracking, read_metrics
from trainer.tracking.metrics import METRICS, put
from trainer.tracking.metrics.table import PHASES
from trainer.tracking.metrics.words import Metric
from trainer.train import parts, step
from trainer.train.fit import fit

NUM_STEPS = 3
STALL_S = 0.05
OWN = (
    Metric("test/rank", "1", "none", "One more than the rank, over ranks.", over_ranks="sum"),
    Metric("test/rank_max", "1", "none", "The largest of them.", over_ranks="max", of="test/rank"),
    Metric(
        "test/logit_mean",
        "1",
        "none",
        "Mean logit of the last chunk of the head.",
        over_ranks="mean",
    ),
    Metric("test/host", "1", "none", "As rank 0 has it.", over_ranks="main"),
)


def train(world, run_dir, source, *, loss="cross_entropy", samples=None):
    model = build_toy_model(world, source, loss=loss)
    tracking = Tracking("toy", "toy", [], {}, run_dir=run_dir) if world.is_main else None
    run = toy_run(world, model, samples or ToySamples(), total_steps=NUM_STEPS, tracking=tracking)
    exit_code = fit(run)
    if tracking is not None:
        tracking.finish(exit_code)
    return exit_code


def train_with_own_metrics(world, run_dir, source):
    """With a loss that measures them."""
    METRICS.update({metric.key: metric for metric in OWN})

    def measuring(logits_CV, labels_C):
        put("test/rank", world.rank + 1)
        put("test/logit_mean", logits_CV.float().mean())
        put("test/host", 7 + world.rank)
        return LOSSES["cross_entropy"](logits_CV, labels_C)

    LOSSES["measuring"] = Loss(cross_entropy, measuring)
    return train(world, run_dir, source, loss="measuring")


def rows(run_dir):
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "train"]


def test_a_metric_of_ones_own_is_combined_over_ranks_and_logged(source, tmp_path):
    assert run_ranks(train_with_own_metrics, 2, tmp_path / "own", source) == [0, 0]
    found = rows(tmp_path / "own")
    assert [row["test/rank"] for row in found] == [3.0] * NUM_STEPS
    assert [(row["test/rank_max"], row["test/host"]) for row in found] == [(2.0, 7)] * NUM_STEPS
    assert len({row["test/logit_mean"] for row in found}) == NUM_STEPS
    assert run_ranks(train, 2, tmp_path / "plain", source) == [0, 0]
    assert [row["train/loss"] for row in found] == [
        row["train/loss"] for row in rows(tmp_path / "plain")
    ]


class SlowOnOneRank(ToySamples):
    def __init__(self, rank):
        super().__init__()
        self._pause_s = STALL_S * rank

    def sample(self, index):
        time.sleep(self._pause_s)
        return super().sample(index)


def train_slowly(world, run_dir, source):
    return train(world, run_dir, source, samples=SlowOnOneRank(world.rank))


@pytest.mark.covers("S0.6 S0.26:C S0.31")
def test_the_rank_that_others_wait_for_is_named_with_its_phase(source, tmp_path):
    assert run_ranks(train_slowly, 2, tmp_path / "run", source) == [0, 0]
    first, second, third = rows(tmp_path / "run")
    assert "time/train/slowest_rank" not in first, "no packet has brought the ranks' times yet"
    for row in (second, third):
        assert row["time/train/slowest_rank"] == 1
        assert row["time/train/data_s_max"] > STALL_S, "rank 0 itself does not wait for data"
        assert (
            row["time/train/data_s_max"] / 2
            <= row["time/train/data_s"]
            < row["time/train/data_s_max"]
        )
        total = sum(row[f"time/train/{phase}_s"] for phase in PHASES)
        assert total == pytest.approx(row["time/train/step_s"], rel=0.02)


def train_noting_norms(world, source):
    """Return {parameter: norm of its whole gradient}, the norm of all parameters (both before the
    update of the second of three steps), and the rows of all steps.
    """
    grad_norms = {}
    weight_norms = []
    model = build_toy_model(world, source)
    run = toy_run(world, model, ToySamples(), total_steps=NUM_STEPS)

    def noting(optimizer, **scalars):
        if run.batches.step == 2:
            for name, parameter in model.named_parameters():
                grad_norms[name] = parameter.grad.full_tensor().double().norm().item()
            weights = full_parameters(model).values()
            weight_norms.extend(weight.double().norm().item() for weight in weights)
        clip.clipped_step(optimizer, **scalars)

    with patch.object(step, "clipped_step", noting), patch.object(parts, "RARE_EVERY", 2):
        assert fit(run) == 0
    return grad_norms, math.hypot(*weight_norms), [row for _, row in run.tracking.rows]


def test_the_norms_of_parameters_and_of_each_block_are_alike_on_all_meshes(source):
    """On one rank, sharded over two, and replicated on two."""
    key = "optim/grad_norm/"
    told = []
    for num_ranks, fsdp_size in ((1, -1), (2, -1), (2, 1)):
        grad_norms, weight_norm, (first, second, third) = run_ranks(
            train_noting_norms, num_ranks, source, fsdp_size=fsdp_size
        )[0]
        assert not any(column.startswith(key) for column in first.keys() | third.keys())
        assert second["optim/param_norm"] == pytest.approx(weight_norm, rel=1e-6)
        blocks = {c.removeprefix(key): norm for c, norm in second.items() if c.startswith(key)}
        for block, norm in blocks.items():
            own = [grad for name, grad in grad_norms.items() if name.startswith(f"{block}.")]
            assert own and norm == pytest.approx(math.hypot(*own), rel=1e-6), block
        assert math.hypot(*blocks.values()) == pytest.approx(second["train/grad_norm"], rel=1e-9)
        told.append(blocks)
    expected = {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"}
    assert expected <= told[0].keys()
    for blocks in told[1:]:
        assert blocks == pytest.approx(told[0], rel=1e-5)
