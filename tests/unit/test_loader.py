"""From samples to packed batches, and the position of a run across restarts."""

import itertools
import multiprocessing
import tempfile
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy import ToySamples

from trainer.data.batch_plan import START, Limits, RankPlan, Schedule, Share
from trainer.data.loader import TrainLoader, ValidationBatches, pack
from trainer.runtime.exit_codes import explain
from trainer.runtime.progress import Position
from trainer.runtime.signals import StopRequest

NUM_SAMPLES = 7
BATCH_SIZE = 3
TWO_EPOCHS = 6
UNLIMITED = Limits(None, None)


SHORT = SimpleNamespace(
    sample=lambda index: (np.arange(3), np.ones(3, dtype=bool)), source_of=np.zeros_like
)
"""Documents of three tokens."""


def test_without_samples_or_with_fewer_tokens_than_ranks_there_is_padding():
    empty = pack(SHORT, []).share(1, 2)
    assert (empty.seqlens, empty.num_tokens) == ((1, 1), 0)
    shares = [pack(SHORT, [7]).share(rank, 5) for rank in range(5)]
    assert [share.num_tokens for share in shares] == [1, 1, 1, 0, 0]
    assert [share.position_ids_T.tolist() for share in shares] == [[0], [1], [2], [0], [1]]
    assert {(share.seqlens, share.sample_ids) for share in shares} == {((3, 2), (7,))}


def plan_of(rank, world_size, limits=UNLIMITED):
    return RankPlan(rank, world_size, limits, quadratic_cost=0.01)


def loader(*, rank=0, world_size=1, num_workers=0, start=START):
    return TrainLoader(
        ToySamples(NUM_SAMPLES),
        plan=plan_of(rank, world_size),
        schedule=Schedule((Share(NUM_SAMPLES),), BATCH_SIZE, 4, start),
        total_steps=TWO_EPOCHS,
        num_workers=num_workers,
    )


def require_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.step == right.step
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
            assert a.sample_ids == b.sample_ids and torch.equal(a.input_ids_T, b.input_ids_T)


@pytest.mark.covers("S3.22 S3.28")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_restart_at_any_step_continues_the_order(num_workers):
    straight = list(loader())
    assert [(step.step, step.epoch) for step in straight] == list(enumerate((0, 0, 0, 1, 1, 1), 1))
    for stop_after in range(TWO_EPOCHS):
        first = loader(num_workers=num_workers)
        done = list(itertools.islice(first, stop_after))
        file = BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        position = stop_after, stop_after // 3, stop_after % 3 * 3
        assert (state["step"], state["epoch"], state["samples_consumed"]) == position
        require_same([*done, *loader(num_workers=num_workers, start=first.position)], straight)


def require_each_once(batches, ids):
    """All ranks together hold these samples, with equally many micro-batches and equal counts."""
    samples = ToySamples(NUM_SAMPLES)
    parts = [part for batch in batches for part in batch.micro_batches]
    num_loss_tokens = sum(part.num_loss_tokens for part in parts)
    num_tokens = sum(part.num_tokens for part in parts)
    assert sorted(index for part in parts for index in part.sample_ids) == sorted(ids)
    assert num_loss_tokens == samples.num_loss_tokens[ids].sum()
    assert num_tokens == samples.lengths[ids].sum()
    counts = {
        (len(batch.micro_batches), batch.num_samples, batch.num_loss_tokens, batch.num_tokens)
        for batch in batches
    }
    assert counts == {(len(batches[0].micro_batches), len(ids), num_loss_tokens, num_tokens)}


@pytest.mark.covers("S0.4 S0.20 S3.28")
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_ranks_continues_with_the_same_samples_each_once(world_size):
    """The position is one integer: any number of ranks continues after step 2 of two ranks."""
    two = loader(world_size=2)
    next(iter(two))
    ranks = [
        loader(rank=rank, world_size=world_size, start=two.position) for rank in range(world_size)
    ]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == TWO_EPOCHS - 1
    for step, batches in enumerate(steps, start=2):
        require_each_once(batches, two.schedule.rows(step))


@pytest.mark.covers("S3.11")
@pytest.mark.parametrize("num_samples", [1, 7])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_validation_visits_every_sample_once(world_size, num_samples):
    samples = ToySamples(num_samples)
    plans = [plan_of(rank, world_size, Limits(64, 2)) for rank in range(world_size)]
    ranks = [ValidationBatches(samples, plan, batch_size=3) for plan in plans]
    starts = range(0, num_samples, 3)
    for start, batches in zip(starts, zip(*ranks, strict=True), strict=True):
        require_each_once(batches, range(num_samples)[start : start + 3])


@pytest.mark.timeout(20)
def test_a_worker_needs_no_short_path_of_temporary_files(tmp_path, monkeypatch):
    """Torch passes tensors through a socket there. With 108 bytes in its path, the run waited
    forever for its first batch.
    """
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    require_same(loader(num_workers=1), loader())


def test_a_worker_that_is_killed_is_told_without_a_stack():
    others = multiprocessing.active_children()
    batches = iter(loader(num_workers=1))
    next(batches)
    (worker,) = (process for process in multiprocessing.active_children() if process not in others)
    with pytest.raises(RuntimeError) as found:
        worker.kill()
        list(batches)
    code, message = explain(found.value, StopRequest())
    assert code == 1 and message.startswith("DataLoader worker (pid") and str(worker.pid) in message
    assert message.endswith("continue with the same command")


def test_a_checkpoint_of_another_position_is_not_taken_over():
    saved = loader(start=Position(1, 0, 3)).state_dict()
    with pytest.raises(RuntimeError, match="but the data loader is at"):
        loader().load_state_dict(saved)
    loader(start=Position(1, 0, 3)).load_state_dict(saved)


def test_a_position_beyond_shorter_data_continues_with_the_next_epoch():
    past = Position(5, 0, NUM_SAMPLES + 1)
    shorter = loader(start=past)
    shorter.load_state_dict(vars(past))
    assert shorter.position == Position(5, 1, 0)
