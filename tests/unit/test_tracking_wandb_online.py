"""wandb online, with a library that keeps the rows that a server would receive."""

import logging
import sys
from types import SimpleNamespace

import pytest
from killed_run import log_steps

from trainer.tracking import Tracking, wandb_backend


class Server:
    """Drops a row whose step is not after the last one, like the real library. It also acts as the
    run that the library returns.
    """

    offline = disabled = False
    url = "https://wandb.example/team/project/runs/1"

    def __init__(self):
        self.rows = []
        self.ids = set()
        self.step = 0

    def init(self, **settings):
        assert settings["resume"] == "allow"
        self.ids.add(settings["id"])
        return self

    def define_metric(self, name, step_metric=None): ...

    def log(self, data, *, step, commit):
        if commit and step >= self.step:
            self.rows.append(data)
            self.step = step + 1

    def finish(self, exit_code): ...


@pytest.fixture
def server(monkeypatch):
    server = Server()
    library = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")),
        login=lambda prompt: True,
        init=server.init,
        Settings=dict,
        teardown=lambda exit_code: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    for name in ("USE_WANDB", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return server


def attempt(run_dir, steps):
    tracking = Tracking("project", "exp", "wandb", {}, run_dir=run_dir, total_steps=12)
    log_steps(tracking, steps)
    tracking.finish(75)


@pytest.mark.covers("S1.8 S3.29 S3.58")
def test_a_resumed_run_goes_on_and_its_address_is_said(tmp_path, server, caplog):
    caplog.set_level(logging.INFO, wandb_backend.__name__)
    for steps in (range(1, 7), range(4, 9), range(9, 13)):
        attempt(tmp_path, steps)
    found = [(row["trainer/step"], key) for row in server.rows for key in row if "/loss" in key]
    expected = [(step, "train/loss") for step in range(1, 13)]
    expected += [(step, "val/loss") for step in range(2, 13, 2)]
    assert sorted(found) == sorted(expected)
    assert len(server.ids) == 1 and f"wandb: {server.url}" in caplog.text
