"""The states of the generators: those of the run's own device, whatever else the machine has."""

import pytest
import torch

from trainer.runtime import seeding


def test_a_cpu_run_on_a_machine_with_cards_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: pytest.fail("asked a card"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: pytest.fail("changed a card"))
    generators = seeding.GeneratorState(torch.device("cpu"))
    state = generators.state_dict()
    assert set(state) == {"cpu", "numpy", "random"}
    generators.load_state_dict({**state, "cuda": torch.zeros(8, dtype=torch.uint8)})


def test_a_cuda_run_keeps_the_state_of_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = torch.device("cuda", 3), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: ("state of", device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: calls.append(args))
    generators = seeding.GeneratorState(device)
    generators.load_state_dict(generators.state_dict())
    assert calls == [(("state of", device), device)]
