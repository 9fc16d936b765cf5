"""The example scripts work as described, on a tiny model. Ranks are forked instead of started."""

import json
import runpy
import sys
from pathlib import Path

import safetensors
import whole_runs
from repository import REPOSITORY
from small_files import read_lines

from trainer import api
from trainer.train.start.compose import load_config

EXAMPLES = REPOSITORY / "examples"


def test_own_rows_are_trained_and_their_model_takes_an_adapter(tmp_path, monkeypatch, capsys):
    def train(*words, num_ranks=None):
        """Train on forked ranks."""
        code, output = whole_runs.run(num_ranks or 1, *words, log=tmp_path / "log")
        assert code == 0, output
        return api.RunDirectory(Path(load_config(list(words)).trainer.default_local_dir))

    def said_by(script, *words):
        """Run a script with arguments. Return its output."""
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "train", train)
    tiny = whole_runs.tiny_model(tmp_path)
    said = said_by("own_data.py", *tiny, "data.train_max_samples=-1")
    rows = read_lines(Path("chats.jsonl"))
    assert len(rows) == 40 and "2 plus 2 is 4." in json.dumps(rows[2])
    export = Path(said.split(": ")[-1])
    assert said.startswith("validation loss ") and (export / "config.json").is_file()
    rest = [word for word in tiny if not word.startswith(("model.", "data.train", "data.val"))]
    said = said_by("lora_one_card.py", *rest)
    with safetensors.safe_open(
        Path(said.split(": ")[-1]) / "adapter_model.safetensors", "pt"
    ) as file:
        assert any("lora_B" in name for name in file.keys())  # noqa: SIM118
