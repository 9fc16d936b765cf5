"""The seeds of a step, and the states of the generators on the run's own device."""

import random

import numpy as np
import pytest
import torch

from trainer.runtime import seeding


def test_a_cpu_run_on_a_machine_with_cards_leaves_them_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: pytest.fail("asked a card"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: pytest.fail("changed a card"))
    generators = seeding.GeneratorState(torch.device("cpu"))
    state = generators.state_dict()
    generators.load_state_dict({**state, "cuda": torch.zeros(8, dtype=torch.uint8)})


def test_a_loaded_state_draws_what_came_after_it_was_saved():
    generators = seeding.GeneratorState(torch.device("cpu"))
    state = generators.state_dict()
    expected = torch.rand(4)
    generators.load_state_dict(state)
    assert torch.equal(torch.rand(4), expected)


def test_each_step_and_rank_seeds_every_generator_with_a_number_that_no_version_changes():
    """Runs that an earlier version started continue with equal numbers."""

    def drawn():
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    seeds = {}
    for step, rank in ((1, 0), (2, 0), (1, 1)):
        seeding.seed_step(1, step=step, rank=rank)
        seeds[step, rank] = torch.initial_seed()
        first = drawn()
        seeding.seed_step(1, step=step, rank=rank)
        assert drawn() == first
    assert seeds == {
        (1, 0): 2264003803813060455,
        (2, 0): 4376239091071838756,
        (1, 1): 6231856892160147382,
    }
