"""Random schedules of ranks, disk and mirror break no promise. A missing safeguard is detected."""

import logging

import pytest
import schedules
from sweeps import short_or_full

from trainer.checkpoint import fsio, lock, retention, rollback
from trainer.checkpoint.save import Agreement, Saver

NUM_SCHEDULES = short_or_full(2000, full=20_000)
NUM_PARTS = 4
MAX_TRIES = 800
"""Number of seeds within which a missing safeguard is detected."""
FIRST_SEEDS = {"carrying out a rollback": 521}
"""First seeds for safeguards that few schedules exercise."""


@pytest.fixture(autouse=True)
def quiet():
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_drawn_schedule_breaks_a_promise(part):
    size = NUM_SCHEDULES // NUM_PARTS
    met, _, faults = schedules.run_seeds(range(1 + part * size, 1 + (part + 1) * size))
    assert faults == []
    assert met.keys() >= schedules.EVENTS.keys(), "every kind of trouble happens"


def nothing(*args, **kwargs):
    return None


def own_answer_only(self, *, value, error, deadline):
    return [value] * self.world.size


SAFEGUARDS = {
    "look at the lock": (Saver, "require_lock", nothing, "another's"),
    "nonce in the lock": (lock.RunLock, "is_held", lambda self: True, "another's"),
    "sync of directories": (fsio, "fsync_dir", nothing, "was saved"),
    "carrying out a rollback": (rollback, "complete", nothing, "undone"),
    "newest spared": (retention, "newest", lambda steps, keep, pointed: [], "was saved"),
    "answers of all ranks": (Agreement, "agree", own_answer_only, ""),
}


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_a_safeguard_left_out_shows(name, monkeypatch):
    place, attribute, replacement, expected = SAFEGUARDS[name]
    monkeypatch.setattr(place, attribute, replacement)
    begin = FIRST_SEEDS.get(name, 1)
    for first in range(begin, begin + MAX_TRIES, 20):
        faults = schedules.run_seeds(range(first, first + 20))[2]
        if faults:
            assert any(expected in fault for fault in faults)
            return
    pytest.fail(f"{MAX_TRIES} schedules without {name}, and none shows it")
