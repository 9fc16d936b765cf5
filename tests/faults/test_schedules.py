"""Drawn schedules of ranks, disk and mirror break no promise; a safeguard left out shows."""

import logging

import pytest
import schedules
from sweeps import short_or_full

NUM_SCHEDULES = short_or_full(2_000, full=20_000)
NUM_PARTS = 8


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
