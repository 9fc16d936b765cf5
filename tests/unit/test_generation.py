"""Answers of exports: what transformers writes, and which model of a server is asked."""

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers

from trainer.config import ConfigError
from trainer.quickstart import MODEL_DIR
from trainer.tools.evaluate.engines import make_generate

EXPORT = Path("checkpoints/sft/first/global_step_500/huggingface")
HABITS = {
    "repetition_penalty": 1.9,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 8,
    "do_sample": True,
    "top_p": 0.01,
}


def answers(engine: str, export: Path, *texts: str) -> list[str]:
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return [text for batch in make_generate(engine, "")(export, prompts, 8) for text in batch]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "huggingface"
    shutil.copytree(MODEL_DIR, path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_code_that_comes_with_an_export_is_refused_and_not_run(export, tmp_path):
    tree = json.loads((export / "config.json").read_text())
    code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (export / "config.json").write_text(json.dumps(tree | {"auto_map": code, "model_type": "own"}))
    (export / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    with pytest.raises(ConfigError, match=r"made by Python code .*auto_map.*Fix: serve it"):
        answers("transformers", export, "add 1")
    assert not (tmp_path / "canary").exists()


def test_sampling_settings_of_the_model_do_not_count_nor_does_the_batch(export):
    texts = ["add 1", "multiply the number by 31", "reverse"] * 12
    plain, path = answers("transformers", export, *texts), export / "generation_config.json"
    assert plain[:3] == answers("transformers", export, *texts[:3]) and len(plain) == 36
    path.write_text(json.dumps(json.loads(path.read_text()) | HABITS))
    assert answers("transformers", export, *texts) == plain


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
        text = body["messages"][-1]["content"].upper()
        self._answer({"choices": [{"message": {"content": text}}]})

    def _answer(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: Server, models: object, export: Path = EXPORT) -> list[str]:
    """Ask two questions and return the models that the server was asked for."""
    server.models, server.asked = models, []
    assert answers(f"http://127.0.0.1:{server.server_port}", export, "a", "b") == ["A", "B"]
    assert all((body["max_tokens"], body["temperature"]) == (8, 0.0) for body in server.asked)
    return [body["model"] for body in server.asked]


BASE = {"id": "base", "root": "/models/qwen"}
MINE = {"id": "mine", "root": f"/elsewhere/{EXPORT}"}
OTHER_RUN = {"id": "other", "root": "/x/checkpoints/sft/second/global_step_500/huggingface"}


@pytest.mark.parametrize(
    ("models", "name"),
    [
        ([BASE], "base"),
        ([{"id": "bare"}], "bare"),
        ([BASE, MINE], "mine"),
        ([OTHER_RUN, MINE], "mine"),
    ],
)
def test_a_server_is_asked_for_the_checkpoint(server, models, name):
    assert asked(server, {"data": models}) == [name] * 2


def test_the_base_beside_an_adapter_is_not_scored_in_its_place(server, tmp_path):
    base, adapter = (tmp_path / run / "global_step_60" / "huggingface" for run in ("full", "lora"))
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    served = [{"id": "base", "root": str(base), "parent": None}]
    with pytest.raises(ConfigError, match="which is not"):
        asked(server, {"data": served}, adapter)
    served.append({"id": "tuned", "root": str(adapter), "parent": "base"})
    assert asked(server, {"data": served}, adapter) == ["tuned"] * 2
    assert asked(server, {"data": served}, base) == ["base"] * 2


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"data": [{"id": "m", "root": "/r/global_step_100/huggingface"}]}, "serves m (/r/global"),
        ({"data": [BASE, {"id": "other", "root": "/x"}]}, f"other (/x), which is not {EXPORT}"),
        ({"data": []}, "serves nothing"),
        ({"detail": "no"}, "/v1/models does not answer as OpenAI's API does: KeyError: 'data'"),
        ([], "does not answer as OpenAI's API does"),
    ],
)
def test_another_checkpoint_is_not_scored_in_its_place(server, models, said):
    with pytest.raises(ConfigError) as error:
        asked(server, models)
    assert said in str(error.value) and server.asked == []
