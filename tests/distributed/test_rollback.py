"""A harmful batch is detected; the run returns to a checkpoint before it and skips it. A kill in
between is harmless.
"""

import math
import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import toy_runs
from ranks import run_ranks
from toy import VOCAB, OneSource, guard_config
from toy_runs import Recipe
from toy_runs import source as source  # a fixture
from whole_runs import saved_steps

from trainer.checkpoint import fsio, layout, rollback
from trainer.data.batch_plan import Schedule, Share
from trainer.errors import EXIT_DONE
from trainer.optim.clip import local_square_sum
from trainer.train.guard import Guard

BAD_STEP = 165
NUM_STEPS = 200
BATCH_SIZE = 8
TARGET_STEP = 140
"""The newest of the checkpoints (one every 20 steps) that is at least 16 steps older."""
BEGUN = 160
"""All other runs continue from this step of the clean run, because the tested steps come later."""
SKIPPED = range(BAD_STEP - 8, BAD_STEP + 9)
USUAL_TOKENS = 8
"""All samples draw from these tokens. A poisoned sample draws from the other tokens, which the
model has learned never to expect.
"""


class Samples(OneSource):
    """Token sequences without a pattern: the loss falls to ln 8 and stays there. One epoch."""

    fingerprint = "rollback"

    def __init__(self, poisoned):
        generator = np.random.default_rng(5)
        self._samples = []
        for i in range(NUM_STEPS * BATCH_SIZE):
            low, high = (USUAL_TOKENS, VOCAB) if i in poisoned else (0, USUAL_TOKENS)
            self._samples.append(generator.integers(low, high, 24).astype(np.int32))
        self.lengths = np.full(len(self._samples), 24)
        self.num_loss_tokens = np.full(len(self._samples), 23)

    def sample(self, index):
        return self._samples[index], np.ones(24, dtype=bool)


def samples_of(step):
    order = Schedule((Share(NUM_STEPS * BATCH_SIZE),), BATCH_SIZE, seed=3)
    return frozenset(int(i) for i in order.rows(step))


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    steps: tuple[int, ...]
    last_loss: float
    skipped: int


def train(world, run_dir, source, fault, on_severe, kill_at=""):
    """`fault`: none, batch (poisoned samples), or rank (the gradient of rank 1 is a thousand times
    too large, once).
    """
    guard = Guard(guard_config(on_severe=on_severe))
    num_calls = [layout.read_pointer(run_dir).step or 0]

    def gradient_sum(parameters):
        num_calls[0] += 1
        if fault == "rank" and world.rank == 1 and num_calls[0] == BAD_STEP:
            for parameter in parameters:
                parameter.grad.mul_(1000.0)
        return local_square_sum(parameters)

    def kill(operation):
        if kill_at and kill_at in f"{operation.kind} {operation.path} {operation.target}":
            os.kill(os.getpid(), signal.SIGKILL)

    fsio.observer = kill
    try:
        result = toy_runs.run(
            world,
            run_dir,
            source,
            Recipe(total_steps=NUM_STEPS, save_freq=20),
            samples=Samples(samples_of(BAD_STEP) if fault == "batch" else frozenset()),
            guard=guard,
            local_square_sum=gradient_sum,
        )
    finally:
        fsio.observer = None
    steps = tuple(step for step, _ in result.rows)
    last_loss = float(np.mean([row["train/loss"] for _, row in result.rows[-10:]]))
    return Outcome(result.exit_code, steps, last_loss, guard.num_skipped)


@pytest.fixture(scope="module")
def clean(root, source):
    """A run on one rank that meets no fault."""
    run_dir = root / "run"
    return run_dir, trained(1, run_dir, source, "none", "rollback")


@pytest.fixture
def begun(clean, tmp_path):
    """A run directory that holds what the clean run had after step `BEGUN`."""
    return toy_runs.begun(clean[0], tmp_path / "run", BEGUN)


@pytest.fixture(scope="module")
def rolled_back(clean, source):
    """A run on one rank that met the poisoned batch."""
    run_dir = toy_runs.begun(clean[0], clean[0].with_name("rolled_back"), BEGUN)
    return run_dir, trained(1, run_dir, source, "batch", "rollback")


def trained(num_ranks, run_dir, source, *arguments):
    """Train on this many ranks, and return what all of them report alike."""
    first, *others = run_ranks(train, num_ranks, run_dir, source, *arguments, timeout_s=240)
    assert all(outcome == first for outcome in others)
    return first


def require_undone(run_dir, found, clean):
    assert found.exit_code == clean.exit_code == EXIT_DONE
    num_until = BAD_STEP + 1 - found.steps[0]
    at_once = tuple(range(found.steps[0], BAD_STEP + 1))
    assert found.steps[:num_until] == at_once, "found at once, by all ranks"
    after = range(TARGET_STEP + 1, NUM_STEPS + 1)
    assert found.steps[num_until:] == tuple(step for step in after if step not in SKIPPED)
    assert found.last_loss == pytest.approx(clean.last_loss, rel=0.02)
    (entry,) = rollback.read(run_dir).entries
    assert (entry.onset, entry.found_step, entry.target_step) == (BAD_STEP, BAD_STEP, TARGET_STEP)
    kept = [*range(20, TARGET_STEP + 1, 20), 180, 200]
    assert saved_steps(run_dir) == kept
    require_set_aside(run_dir)


def require_set_aside(run_dir):
    """The checkpoint after the harmful batch is not lost."""
    assert [path.name for path in run_dir.glob(".discarded*")] == [
        f".discarded_global_step_{BEGUN}.0"
    ]


@pytest.mark.covers("S2.36:C S2.41:C")
def test_a_poisoned_batch_is_undone_and_not_seen_again(rolled_back, clean):
    undisturbed = clean[1]
    require_undone(*rolled_back, undisturbed)
    assert undisturbed.steps == tuple(range(1, NUM_STEPS + 1))
    assert undisturbed.last_loss == pytest.approx(math.log(8), rel=0.02)


@pytest.mark.parametrize("fault", ["batch", "rank"])
def test_two_ranks_undo_it_together_wherever_it_came_from(source, begun, clean, fault):
    found = trained(2, begun, source, fault, "rollback")
    assert found.steps[0] == BEGUN + 1
    require_undone(begun, found, clean[1])


def test_a_severe_update_can_be_left_out_by_the_device(source, begun):
    found = trained(2, begun, source, "rank", "skip")
    assert (found.exit_code, found.skipped) == (EXIT_DONE, 1)
    assert found.steps == tuple(range(BEGUN + 1, NUM_STEPS + 1))


@pytest.mark.parametrize("kill_at", [f"/{rollback.FILE}", f"/.discarded_global_step_{BEGUN}"])
def test_a_kill_during_a_rollback_leaves_a_run_that_finishes_it(
    source, begun, rolled_back, kill_at
):
    """Before its record is on the disk, the rollback is decided again. After that, the next start
    completes it.
    """
    with pytest.raises(AssertionError, match="died without a result"):
        trained(1, begun, source, "batch", "rollback", kill_at)
    assert bool(rollback.read(begun).entries) == ("discarded" in kill_at)
    resumed = trained(1, begun, source, "batch", "rollback")
    assert resumed.exit_code == EXIT_DONE and resumed.last_loss == rolled_back[1].last_loss
    assert set(resumed.steps[-40:]).isdisjoint(SKIPPED) and resumed.steps[-1] == NUM_STEPS
    require_set_aside(begun)
