"""Random histories of saves, kills at any file operation, damage and restarts: a good checkpoint
is never lost.
"""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from checkpoint_fakes import Run, content_of
from sweeps import short_or_full

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import Operation

NUM_HISTORIES = short_or_full(80, full=400)
NUM_EVENTS = 12
MAX_OPERATIONS = 100
"""A save and its rotation have fewer."""


class Killed(BaseException):
    """Stands for `kill -9`: no `except` of the code under test catches it."""


@contextmanager
def killed_before(number: int | None) -> Iterator[None]:
    """Kill before the operation of this number; None: not at all."""
    num_seen = 0

    def observe(operation: Operation) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == number:
            raise Killed

    fsio.observer = observe
    try:
        yield
    finally:
        fsio.observer = None


def damage(run: Run, chance: random.Random) -> None:
    """Damage one checkpoint, but not the only good one, or the pointer."""
    if chance.random() < 0.3:
        text = chance.choice(["", "garbage", "-1", "999", "../x"])
        (run.run_dir / layout.POINTER).write_text(text)
        return
    good = sorted(run.good_steps())
    if len(good) < 2:
        return
    path = run.run_dir / layout.step_dir_name(chance.choice(good))
    file = path / chance.choice([*content_of(0), layout.MANIFEST])
    data = bytearray(file.read_bytes())
    match chance.choice(["flip", "truncate", "delete"]):
        case "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
        case "truncate":
            file.write_bytes(data[: chance.randrange(len(data))])
        case "delete":
            file.unlink()


def live_through(run: Run, chance: random.Random) -> None:
    alive = True
    before = set[int]()
    for _ in range(NUM_EVENTS):
        event = chance.choice(["save", "save", "save", "damage"]) if alive else "restart"
        if event == "damage":
            damage(run, chance)
            before = run.good_steps()
            alive = False  # who damages the disk of a running job stops it first
            continue
        number = chance.randint(1, MAX_OPERATIONS) if chance.random() < 0.5 else None
        alive = False
        try:
            with killed_before(number):
                found = run.save() if event == "save" else run.restart()
            alive = True
        except Killed:
            pass
        if event == "restart" and alive:
            assert found == max(before, default=None), f"continues from {found} of {before}"
            if found is None:
                run.step = 0
                shutil.rmtree(run.run_dir)  # the user starts a new run
                run.run_dir.mkdir()
                run.acknowledged.clear()
        after = run.good_steps()
        assert after or not before, f"{event} lost the last good checkpoint of {before}"
        assert len(layout.committed(run.run_dir)) <= run.keep + 1
        newest = max((step for step in run.acknowledged if step in before), default=0)
        assert max(after, default=0) >= newest, f"{event} lost the acknowledged step {newest}"
        before = after


@pytest.mark.covers("S3.24 S3.54")
def test_random_histories(memory_dir):
    for seed in range(NUM_HISTORIES):
        chance = random.Random(seed)
        run = Run(memory_dir / str(seed), keep=chance.randint(1, 5))
        run.run_dir.mkdir()
        try:
            live_through(run, chance)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(run.run_dir)
