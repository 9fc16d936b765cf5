"""What transformers writes behind prompts for an evaluation: by what is asked for, not by the
model's own habits.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from trainer.config import ConfigError
from trainer.quickstart import MODEL_DIR
from trainer.serving.generation import Sampling, TransformersEngine, Turns

HABITS = {
    "repetition_penalty": 1.9,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 8,
    "top_k": 1,
    "top_p": 0.01,
}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "huggingface"
    shutil.copytree(MODEL_DIR, path)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path)
    )
    model.save_pretrained(path)
    return path


def written(export: Path, sampling: Sampling, num_prompts: int = 12) -> list[str]:
    turns: Turns = [{"role": "user", "content": "add 1"}]
    return [
        text
        for _, text in TransformersEngine().generate(
            export, dict.fromkeys(range(num_prompts), turns), sampling
        )
    ]


def test_code_that_comes_with_an_export_is_refused_and_not_run(
    export: Path, tmp_path: Path
) -> None:
    tree = json.loads((export / "config.json").read_text())
    changes = {
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
        "model_type": "own",
    }
    (export / "config.json").write_text(json.dumps(tree | changes))
    (export / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    with pytest.raises(
        ConfigError, match=r"huggingface' is made by Python code .*auto_map.*Fix: serve it"
    ):
        written(export, Sampling(max_new_tokens=1))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_settings_of_the_model_do_not_count(export: Path, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=temperature)
    plain, path = written(export, sampling), export / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HABITS))
    assert written(export, sampling) == plain


def test_sampling_draws_from_all_tokens(export: Path) -> None:
    """As vLLM does, not from the 50 likeliest: the model hardly prefers any of its thousands."""
    assert (
        len(set(written(export, Sampling(max_new_tokens=1, temperature=1.0), num_prompts=64))) > 50
    )
