"""wandb online, with a library that keeps what a server would: rows it received and the summary."""

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from killed_run import train_row, val_row

from trainer.tracking import Tracking, wandb_backend

URL = "https://wandb.example/team/project/runs/1"


class Server:
    """Drops a row whose step is not beyond the last, as the real one does. It is also the run that
    the library returns.
    """

    offline = disabled = False
    url = URL

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.summary: dict[str, Any] = {"train/loss": 1.0}
        self.ids: set[str] = set()
        self.last_step = -1
        self.exit_codes: list[int] = []

    def init(self, **settings: Any) -> "Server":
        assert settings["resume"] == "allow"
        self.ids.add(settings["id"])
        self.step = self.last_step + 1
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, data: dict[str, float], *, step: int, commit: bool) -> None:
        if commit and step > self.last_step:
            self.rows.append(data)
            self.last_step = step

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    settings = types.SimpleNamespace(mode="online")
    library = types.ModuleType("wandb")
    library.__dict__.update(
        setup=lambda: types.SimpleNamespace(settings=settings),
        login=lambda prompt: True,
        init=server.init,
        Settings=lambda **settings: settings,
        teardown=lambda exit_code: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    for name in ("USE_WANDB", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return server


def attempt(run_dir: Path, steps: range, *, exit_code: int = 75) -> None:
    tracking = Tracking("project", "exp", "wandb", {}, run_dir=run_dir, total_steps=12)
    for step in steps:
        tracking.log(train_row(step), step)
        if step % 2 == 0:
            tracking.log(val_row(step), step)
    tracking.finish(exit_code)


def steps_of(server: Server, key: str) -> list[int]:
    return [int(row["trainer/step"]) for row in server.rows if key in row]


@pytest.mark.covers("S1.8 S3.29 S3.58")
def test_a_resumed_run_goes_on_and_its_address_is_said(tmp_path, server, caplog):
    caplog.set_level(logging.INFO, wandb_backend.__name__)
    attempt(tmp_path, range(1, 7))
    attempt(tmp_path, range(4, 9), exit_code=1)
    attempt(tmp_path, range(9, 13), exit_code=0)
    assert steps_of(server, "train/loss") == list(range(1, 13))
    assert steps_of(server, "val/loss") == [2, 4, 6, 8, 10, 12]
    assert len(server.ids) == 1 and server.exit_codes == [75, 1, 0]
    assert f"wandb: {URL}" in caplog.text
