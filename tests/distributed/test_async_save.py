"""Case 25, background saves: they hold the state of their step, run one at a time, and lose no
error.
"""

import threading
import time

import pytest
from faults.save_points import Survey
from ranks import run_ranks
from toy_runs import Recipe, run
from toy_runs import source as source  # a fixture

from trainer.checkpoint import fsio, layout, manager
from trainer.checkpoint.shards import read_torch
from trainer.optim.clip import local_square_sum
from trainer.tools.verify import equality
from trainer.tools.verify.equality import Comparison

WRITER = "checkpoint"
FAILED = "checkpoint/failed_in_a_row"
GIVEN_UP_S = 20.0


def checkpoint_differences(one, other):
    """Return the differences in the listed files except durations: values, and shards bit for bit.

    Pickles of equal tensors may differ in their shared objects.
    """
    manifest = layout.inspect(one).manifest
    found = Comparison()
    for record in manifest.files:
        ours, theirs = (path / record.path for path in (one, other))
        if record.path.endswith(".pt"):
            left, right = (dict(equality._leaves(read_torch(file))) for file in (ours, theirs))
            for name in left.keys() | right.keys():
                found.add(f"{record.path} {name}", left.get(name), right.get(name))
        else:
            found.add(record.path, record.sha256, fsio.sha256_of(theirs))
    return [difference for difference in found.differences if "productive_s" not in difference]


def writers():
    return [thread for thread in threading.enumerate() if thread.name == WRITER]


def before_shards(act):
    """Return an observer that acts in the thread of a background save, before its snapshot is
    written.
    """

    def observer(operation):
        is_writing = threading.current_thread().name == WRITER
        if is_writing and operation.path.name == "shards.begin":
            act()

    return observer


class Steps:
    """Replaces `local_square_sum`: counts the steps, and acts in each step before the ranks reduce."""

    def __init__(self, act=lambda step: None):
        self.num_begun = 0
        self._act = act

    def __call__(self, parameters):
        self.num_begun += 1
        self._act(self.num_begun)
        return local_square_sum(parameters)


def train_ahead_of_the_writer(world, run_dir, source):
    """Write no snapshot before training has changed the state twice. Return the steps begun then."""
    steps = Steps()
    begun = []

    def wait():
        save_step = steps.num_begun
        until = time.monotonic() + GIVEN_UP_S
        while steps.num_begun < save_step // 2 * 2 + 2:
            assert time.monotonic() < until, "training waits for a save behind it"
            time.sleep(0.002)
        begun.append(steps.num_begun)

    fsio.observer = before_shards(wait)
    run(world, run_dir, source, Recipe(async_save=True), local_square_sum=steps)
    return begun


@pytest.mark.covers("S3.12")
def test_it_holds_the_state_of_its_step_while_training_changes_it(source, tmp_path):
    run_ranks(run, 2, tmp_path / "sync", source, Recipe())
    assert run_ranks(train_ahead_of_the_writer, 2, tmp_path / "async", source) == [[4, 6], [4, 6]]
    for mode in ("async", "sync"):
        assert Survey.of(tmp_path / mode) == Survey(6, (2, 4, 6))
    for step in map(layout.step_dir_name, (2, 4, 6)):
        assert checkpoint_differences(tmp_path / "async" / step, tmp_path / "sync" / step) == []
    steps = (tmp_path / "sync" / layout.step_dir_name(step) for step in (2, 4))
    found = "\n".join(checkpoint_differences(*steps))
    for part in ("rank_1.pt lm_head.weight", "exp_avg_sq", "data.pt", "model.safetens"):
        assert part in found, "steps 2 and 4 must not pass for equal"


def train_failing(world, run_dir, source):
    """Let the first two saves fail on rank 1. Return the steps of all tries, and the counted
    failures by step.
    """
    tries = []
    steps = Steps(lambda step: [writer.join(GIVEN_UP_S) for writer in writers()])

    def observer(operation):
        if operation.path.name == "open.begin":
            tries.append(steps.num_begun)
        is_write = operation.kind == "write" and operation.path.name == layout.optim_file(2, 1)
        if is_write and len(tries) <= 2:
            raise OSError(28, "No space left on device")

    fsio.observer = observer
    manager.RETRY_AFTER_S = (0.0, 0.0)
    recipe = Recipe(total_steps=9, save_freq=4, async_save=True)
    result = run(world, run_dir, source, recipe, local_square_sum=steps)
    return tries, [(step, row[FAILED]) for step, row in result.rows if FAILED in row]


def test_an_error_behind_training_is_counted_and_all_ranks_try_again_at_once(source, tmp_path):
    """A failed save is known in the next step, long before the next save is due."""
    (tries, counted), (others, _) = run_ranks(train_failing, 2, tmp_path / "run", source)
    assert tries == others == [4, 5, 6, 8, 9]
    assert counted == [(5, 1), (6, 2)]
    assert Survey.of(tmp_path / "run") == Survey(9, (6, 8, 9))
