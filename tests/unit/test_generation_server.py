"""A server that is asked for answers: which of its models is scored, and what is said of one
that is none.
"""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trainer.cli.evaluate import main
from trainer.config import ConfigError
from trainer.serving.generation import Sampling, make_engine

EXPORT = Path("checkpoints/sft/first/global_step_500/huggingface")


class Server(HTTPServer):
    models: object = ()
    asked: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self._answer(
            {"choices": [{"message": {"content": body["messages"][-1]["content"].upper()}}]}
        )

    def _answer(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *words: object) -> None:
        """Not on stderr."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answers(server: Server, export: Path = EXPORT) -> dict[int, str]:
    engine = make_engine(f"http://127.0.0.1:{server.server_port}", "")
    prompts = {7: [{"role": "user", "content": "a"}], 9: [{"role": "user", "content": "b"}]}
    return dict(engine.generate(export, prompts, Sampling(max_new_tokens=3)))


BASE = {"id": "base", "root": "/models/qwen"}
ADAPTER = {"id": "mine", "root": f"/elsewhere/{EXPORT}"}


@pytest.mark.parametrize(
    ("models", "name"),
    [
        ([BASE], "base"),
        ([{"id": "bare"}], "bare"),
        ([BASE, ADAPTER], "mine"),
        ([ADAPTER, {**ADAPTER, "id": "b"}], "mine"),
    ],
)
def test_a_server_is_asked_for_the_checkpoint_and_not_for_its_base(
    server: Server, models: list[Any], name: str
) -> None:
    server.models = {"data": models}
    assert answers(server) == {7: "A", 9: "B"}
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in server.asked} == {
        (name, 3, 0.0)
    }


def test_an_adapter_on_another_runs_export_of_the_same_step_is_not_taken_for_that(
    server: Server, tmp_path: Path
) -> None:
    base, adapter = (tmp_path / run / "global_step_60" / "huggingface" for run in ("full", "lora"))
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    served = [{"id": "base", "root": str(base), "parent": None}]
    server.models = {"data": served}
    with pytest.raises(ConfigError, match="which is not"):
        answers(server, adapter)
    server.models = {"data": [*served, {"id": "tuned", "root": str(adapter), "parent": "base"}]}
    answers(server, adapter)
    answers(server, base)
    assert [body["model"] for body in server.asked] == ["tuned"] * 2 + ["base"] * 2
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/small"})
    )
    server.models = {"data": [{"id": "org/small", "root": "org/small"}]}
    with pytest.raises(ConfigError, match="serves org/small"):
        answers(server, adapter)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (
            {"data": [{"id": "m", "root": "/runs/global_step_100/huggingface"}]},
            "serves m (/runs/global_step_100/hugg",
        ),
        (
            {"data": [BASE, {"id": "other", "root": "/x"}]},
            f"other (/x), which is not {EXPORT}: serve that there",
        ),
        ({"data": []}, "serves nothing"),
        ({"detail": "no"}, "/v1/models does not answer as OpenAI's API does: KeyError: 'data'"),
        ([], "does not answer as OpenAI's API does"),
    ],
)
def test_another_checkpoint_is_not_scored_in_its_place(
    server: Server, models: object, said: str
) -> None:
    server.models = models
    with pytest.raises(ConfigError) as error:
        answers(server)
    assert said in str(error.value) and server.asked == []


@pytest.mark.parametrize(
    "words",
    [
        "--temperature -1",
        "--temperature nan",
        "--time-limit 0",
        "--max-new-tokens 0",
        "--memory-mib 0",
    ],
)
def test_a_limit_that_cannot_be_is_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--score", "exec", "--allow-code", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err and list(tmp_path.iterdir()) == []
