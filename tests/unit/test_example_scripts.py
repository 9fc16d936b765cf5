"""The scripts that a newcomer starts from do what they say, on a tiny model. Ranks are forked
instead of started.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import whole_runs

from trainer import api
from trainer.train.start.compose import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
Start = Callable[..., str]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def start(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs a script with words behind it; what it printed."""

    def on_forked_ranks(*words: str, num_ranks: int | None = None) -> api.RunDirectory:
        code, output = whole_runs.run(num_ranks or 1, *words, log=here / "log")
        assert code == 0, output
        return api.RunDirectory(Path(load_config(list(words)).trainer.default_local_dir))

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as exit:
            assert exit.code == 0, exit.code
        return capsys.readouterr().out

    monkeypatch.chdir(here)
    monkeypatch.setattr(api, "train", on_forked_ranks)
    return run


def test_own_rows_are_trained_and_their_model_takes_an_adapter(start, here):
    tiny = whole_runs.tiny_model(here)
    said = start("own_data.py", *tiny, "data.train_max_samples=-1")
    rows = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
    assert len(rows) == 40 and "2 plus 2 is 4." in json.dumps(rows[2])
    export = Path(said.strip().split(": ")[-1])
    assert said.startswith("validation loss ") and (export / "config.json").is_file()
    rest = [word for word in tiny if not word.startswith(("model.", "data.train", "data.val"))]
    said = start("lora_one_card.py", *rest)
    with safetensors.safe_open(
        Path(said.strip().split(": ")[-1]) / "adapter_model.safetensors", "pt"
    ) as file:
        assert any("lora_B" in name for name in file.keys())  # noqa: SIM118
