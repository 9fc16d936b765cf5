"""The workspace in W&B, made by their own package at a server that stands in for theirs."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trainer.cli.workspace import main
from trainer.metrics import METRICS
from trainer.metrics.words import GROUPS

VIEWER = {"viewer": {"id": "1", "username": "ann", "entity": "ann", "email": "", "flags": "{}", "teams": {"edges": []}}}
SAVED = {"upsertView": {"view": {"id": "1", "name": "abc"}, "inserted": True}}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """What the server was told to save."""
    found: list[dict[str, Any]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked = json.loads(body) if body.startswith(b"{") else {}
            is_save = "upsertView" in asked.get("query", "")
            if is_save:
                found.append(asked["variables"])
            text = json.dumps({"data": SAVED if is_save else VIEWER}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield found
    server.shutdown()
    server.server_close()


def test_a_workspace_has_every_metric_of_a_step_once_in_sections(
    saved: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "--entity", "team"]) == 0
    assert "workspace made: http" in capsys.readouterr().out
    (view,) = saved
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "sft", "fsdp-sft")
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    panels = {one["name"].partition(":")[0]: [panel["config"] for panel in one["panels"]] for one in sections}
    assert list(panels) == ["evaluation", *(group for group in GROUPS if group in panels)]
    assert {"optimisation", "validation", "timing", "memory"} <= panels.keys()
    drawn = [key for configs in panels.values() for config in configs for key in config.get("metrics", ())]
    assert sorted(drawn) == sorted(key for key, m in METRICS.items() if m.every in ("step", "eval") and "<" not in key)
    assert {config["xAxis"] for configs in panels.values() for config in configs} == {"trainer/step"}
    assert ["train/loss", "val/loss"] in [config.get("metrics") for config in panels["optimisation"]]


def test_without_the_package_or_the_network_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["sft"]) == 2
    assert "pip install 'wandb-workspaces>=0.4.13'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb_workspaces", sys)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["sft"]) == 2
    assert "is made online" in capsys.readouterr().err
