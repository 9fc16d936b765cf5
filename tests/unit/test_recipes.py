"""Every recipe composes; the 7B coder recipe holds what its requirement says."""

from pathlib import Path

import pytest

from trainer.config import QUICKSTART, Config, sources_of
from trainer.train.start.compose import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (REPOSITORY / "conf/experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def coder() -> Config:
    return load_config(["experiment=phase1_sft_qwen7b_coder"])


def test_the_recipes_are_found():
    assert {"full_7b", "gsm8k", "lora_qwen7b", "mixture", "continued_pretraining"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_stands_alone(name):
    config, defaults = load_config([f"experiment={name}"]), load_config([])
    assert config.data.train_files != QUICKSTART
    assert config.model.partial_pretrain != QUICKSTART
    assert config.trainer.default_local_dir != defaults.trainer.default_local_dir
    assert config.data.val_files is not None or config.data.val_ratio > 0


def test_the_mixture_names_its_sources():
    code, math = sources_of(load_config(["experiment=mixture"]).data, "train_files")
    assert (code.name, code.repeat, code.keys.prompt_key, code.keys.messages_key) == (
        "code",
        1.0,
        None,
        "messages",
    )
    assert (math.name, math.repeat, math.keys.prompt_key, math.keys.response_key) == (
        "math",
        2.5,
        "question",
        "answer",
    )


@pytest.mark.covers("S3.12", "S3.15", "S3.24", "S3.26")
def test_the_coder_recipe_saves_and_validates_as_required(coder):
    assert coder.trainer.project_name == "rlvr_coding_model"
    assert (
        coder.trainer.default_local_dir == "checkpoints/rlvr_coding_model/phase1_sft_qwen7b_coder"
    )
    assert (coder.trainer.save_freq, coder.trainer.test_freq, coder.trainer.max_ckpt_to_keep) == (
        500,
        500,
        5,
    )
    assert coder.trainer.logger == ["console", "wandb"]
    assert coder.trainer.checkpoint.save_contents == ["model", "optimizer", "extra", "hf_model"]
    assert coder.trainer.resume_mode == "auto"


def test_the_coder_recipe_takes_its_data_as_required(coder):
    assert coder.data.max_length == 4096
    assert coder.data.val_files is None and coder.data.val_ratio == 0.02
    assert coder.data.truncation != "left"
    assert "Qwen2.5-Coder-7B" in coder.model.partial_pretrain
