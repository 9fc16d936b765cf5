"""Promise 1: a step's loss and gradient depend only on the global batch.

Tolerances: fp32 sums in a different order agree to a few 1e-8 relative. The limits of 1e-6 for the
loss and 1e-5 for the norm leave room for twelve steps of training.
"""

import math
from pathlib import Path

import plain_training
import pytest
import torch
from plain_training import AS_DEFINED, Definition, Document
from ranks import each, run_ranks
from sweeps import short_or_full
from toy import ToySamples, relative, short_run, write_model_config
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.batch_plan import Schedule
from trainer.runtime import seeding

STEPS = short_or_full(4, full=8)
EXECUTIONS = {
    (1, -1): {"one rank, one document a micro-batch": {"max_samples": 1}},
    (2, -1): {
        "two ranks": {"max_samples": 4},
        "token budget": {"max_tokens": 48},
        "parameters stay gathered": {"reshard_after_forward": False},
        "recomputed": {"enable_gradient_checkpointing": True},
        "recomputed in part": {"enable_gradient_checkpointing": "selective"},
        "layer inputs in host memory": {"enable_gradient_checkpointing": "offload"},
        "documents run alone": {"is_packed": False},
    },
    (4, -1): {"four ranks": {"max_samples": 16}, "one document each": {"max_samples": 1}},
    (4, 2): {"replicas": {}},
    (5, -1): {"more ranks than samples in a step": {"max_samples": 1}},
}
"""(Ranks, fsdp_size): effect of the setting."""


def rows_of(world, source, max_samples=None, **changes):
    """Return the rows that a short run logged."""
    optim = AS_DEFINED | changes.pop("optim", {})
    return short_run(
        world, source, total_steps=STEPS, optim=optim, max_samples=max_samples, **changes
    ).tracking


def train(world, source, max_samples=None, **changes):
    """Return (losses, norms, validation losses, shares of correct tokens) of a short run."""
    rows = rows_of(world, source, max_samples, **changes)
    keys = ("train/loss", "train/grad_norm", "val/loss", "train/token_accuracy")
    return [rows.column(key) for key in keys]


def plain_run(source, adapter=None, *, num_steps=STEPS, **changes):
    """Run the training by its definition. It uses nothing of ours but the order and the key of the
    first weights.

    `adapter`: directory of one that peft loads and trains, with the model frozen. Returns the
    columns of the rows.
    """
    path = Path(source.path)
    if source.random_weights:
        torch.manual_seed(seeding.key("init", 7))
        config = AutoConfig.from_pretrained(path)
        path /= "weights"
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    samples = ToySamples()
    schedule = Schedule(samples.shares, 8, seed=3)
    definition = Definition(
        model=path,
        adapter=None if adapter is None else Path(adapter),
        steps=[
            [
                Document(*(part.tolist() for part in samples.sample(int(n))), "")
                for n in schedule.rows(step)
            ]
            for step in range(1, num_steps + 1)
        ],
        validation=[],
        test_freq=num_steps,
        lr=3e-3,
        max_norm=1.0,
        **changes,
    )
    rows = plain_training.train(definition).train.values()
    return {key: [row[key] for row in rows if key in row] for row in rows for key in row}


@pytest.mark.covers("S0.9 S2.35:C S3.5 S3.8 S3.9 S3.10 S3.11")
@pytest.mark.parametrize(("optimizer", "is_tied"), [("adamw", True), ("muon", False)])
def test_every_execution_equals_the_plain_loop(tmp_path, optimizer, is_tied):
    source = write_model_config(tmp_path, tie_word_embeddings=is_tied)
    reference = plain_run(source, optimizer=optimizer)
    runs = {}
    for (size, fsdp_size), executions in EXECUTIONS.items():
        chosen = {"optim": {"name": optimizer}}
        variants = {how: changes | chosen for how, changes in executions.items()}
        runs |= run_ranks(each, size, train, source, variants, fsdp_size=fsdp_size)[0]
    _, _, expected, _ = runs["two ranks"]
    for name, (losses, norms, val_losses, accuracies) in runs.items():
        assert relative(losses, reference["train/loss"]) < 1e-6, name
        assert relative(norms, reference["train/grad_norm"]) < 1e-5, name
        assert relative(val_losses, expected) < 1e-6, name
        assert losses[-1] < losses[0], name
        assert accuracies == reference["train/token_accuracy"] and 0 < max(accuracies) < 1, name


@pytest.mark.parametrize("model_type", ["qwen2", "granite"])
def test_with_another_trained_loss_the_shown_one_is_cross_entropy(tmp_path, model_type):
    """Compare with a plain loop in float64. granite computes its full logits. Both losses come with
    one reduction.
    """
    source = write_model_config(tmp_path, model_type)
    defined = plain_run(source, loss="dft")
    losses = defined["train/loss"]
    objectives = defined["train/objective"]
    variants = {"usual": {}, "dft": {"loss": "dft", "max_samples": 2}}
    for world_size in (1, 2):
        found = run_ranks(each, world_size, rows_of, source, variants)[0]
        rows = found["dft"]
        assert relative(rows.column("train/loss"), losses) < 1e-6
        assert relative(rows.column("train/objective"), objectives) < 1e-6
        assert relative(rows.column("train/grad_norm"), defined["train/grad_norm"]) < 1e-5
        assert rows.column("train/token_accuracy") == defined["train/token_accuracy"]
        assert rows.column("train/ppl") == pytest.approx(
            [math.exp(loss) for loss in losses], rel=1e-5
        )
        assert rows.column("train/loss_max_rank")[0] >= losses[0] * (1 - 1e-6) > 2 * objectives[0]
        assert abs(rows.column("val/gap")[-1]) < 1, "both of its losses are cross-entropy"
        assert not found["usual"].column("train/objective"), "it would repeat train/loss"
