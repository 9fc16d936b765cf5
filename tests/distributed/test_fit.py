"""Tests of the work around a run's steps: random numbers, heartbeats, validation, and the end."""

from unittest.mock import Mock

import pytest
import torch
from ranks import run_ranks
from toy import ToySamples, build_toy_model, toy_run, write_model_config
from toy_runs import StopsAfter
from toy_runs import source as source  # a fixture

from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import ValidationBatches
from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.runtime.heartbeat import Heartbeat
from trainer.train.fit import fit, validate


def seeds_in_steps(world, source):
    """Seed of the generator in the first forward pass of each of two steps."""
    model = build_toy_model(world, source)
    seeds = []
    plain = model.forward

    def forward(batch):
        seeds.append(torch.initial_seed())
        return plain(batch)

    model.forward = forward
    assert fit(toy_run(world, model, ToySamples(), total_steps=2)) == EXIT_DONE
    return seeds


def test_each_rank_draws_its_own_random_numbers_in_each_step(source):
    found = run_ranks(seeds_in_steps, 2, source)
    assert len({seed for seeds in found for seed in seeds}) == 4


def beats_of_a_step(world, source):
    run = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=1, max_samples=1)
    run.heartbeat = Mock(spec=Heartbeat)
    fit(run)
    return run.heartbeat.beat.call_count, run.batches.schedule.batch_size


def test_the_watchdog_hears_of_every_micro_batch(source):
    """A step of many micro-batches may take longer than the limit for silence."""
    ((num_beats, num_micro_batches),) = run_ranks(beats_of_a_step, 1, source)
    assert num_beats >= num_micro_batches == 8


def validation_losses(world, source):
    samples = ToySamples()
    batches = ValidationBatches(samples, RankPlan(0, 1, Limits(None, None), 0.0), batch_size=8)
    run = toy_run(
        world, build_toy_model(world, source), samples, total_steps=1, validation_batches=batches
    )
    for _ in range(2):
        run.model.train()
        validate(run, 0)
    return run.tracking.column("val/loss")


def test_a_validation_draws_no_dropout(tmp_path):
    found = []
    for rate in (0.0, 0.5):
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), rate)
        source = write_model_config(tmp_path / str(rate), "gpt2", **rates)
        found += run_ranks(validation_losses, 1, source)[0]
    assert len(found) == 4 and len(set(found)) == 1


def exit_code(world, source, stop_in_step):
    run = toy_run(
        world,
        build_toy_model(world, source),
        ToySamples(),
        total_steps=2,
        stop=StopsAfter(stop_in_step),
    )
    return fit(run)


@pytest.mark.parametrize(("step", "code"), [(1, EXIT_RESUMABLE), (2, EXIT_DONE)])
def test_a_run_that_is_stopped_in_its_last_step_is_done(source, step, code):
    assert run_ranks(exit_code, 1, source, step) == [code]
