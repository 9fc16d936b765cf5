"""The sums of a validation: token-weighted, over documents, with any packing."""

import math

import numpy as np
import pytest
import torch
from ranks import run_ranks
from toy import ToySamples

from trainer.data.batch import LossOutput
from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import build_step
from trainer.train.validation import Validation

NUM_SAMPLES = 30
SEED = 11


def loss_of(batch):
    """A loss for every supervised position that depends only on its token and document."""
    documents = torch.bucketize(
        batch.supervised_S + batch.start, batch.cu_seqlens_D1[1:].long(), right=True
    )
    ids = torch.tensor(batch.sample_ids)[documents] if batch.sample_ids else torch.zeros(0)
    return 1.0 + 0.1 * ids + 0.01 * batch.position_ids_T[batch.supervised_S]


def validated(world, batch_size, max_tokens, num_samples=NUM_SAMPLES):
    samples = ToySamples(NUM_SAMPLES, SEED)
    validation = Validation(world, length_facts={"seq_total_len_mean": 20.0})
    share = world.sequence_rank, world.sequence_size
    plan = RankPlan(
        world.data_rank, world.num_data_ranks, Limits(max_tokens, None), 0.0, share=share
    )
    for ids in np.array_split(np.arange(num_samples), num_samples // batch_size):
        batch = build_step(samples, ids, plan, step=0, epoch=0)
        for micro_batch in batch.micro_batches:
            losses = loss_of(micro_batch)
            validation.add(micro_batch, LossOutput(losses.sum(), losses, losses > 2.505))
        assert not validation.end_batch(batch, is_stopping=False)
    return validation.row(train_loss=1.0)


@pytest.mark.covers("S0.5 S0.8 S0.25 S3.11")
def test_a_validation_is_the_same_however_it_is_packed_and_dealt():
    samples = ToySamples(NUM_SAMPLES, SEED)
    losses_by_sample = [
        1.0 + 0.1 * index + 0.01 * np.flatnonzero(samples.sample(index)[1][1:])
        for index in range(NUM_SAMPLES)
    ]
    losses = np.concatenate(losses_by_sample)
    mean = losses.mean()
    residuals = [(own - mean).sum() for own in losses_by_sample]
    rows = [*run_ranks(validated, 1, 30, None), *run_ranks(validated, 2, 7, 60)]
    rows += run_ranks(validated, 2, 7, 60, sequence_size=2)
    for row in rows:
        assert row["val/loss"] == pytest.approx(mean, rel=1e-6)
        stderr = math.hypot(*residuals) / len(losses)
        assert row["val/loss_stderr"] == pytest.approx(stderr, rel=1e-4), "float32 losses"
        assert row["val/token_accuracy"] == np.mean(losses > 2.505)
        assert row["val/gap"] == pytest.approx(mean - 1.0) and row["val/samples"] == NUM_SAMPLES
        assert row["val/seq_total_len_mean"] == 20.0
        assert row["time/eval/total_s"] >= row["time/eval/step_s"] > 0


def test_one_sample_has_no_standard_error():
    (row,) = run_ranks(validated, 1, 1, None, 1)
    assert row["val/samples"] == 1 and "val/loss_stderr" not in row
