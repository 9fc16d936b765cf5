"""Every recipe composes, and the recipe for the 7B coder has the required values."""

import pytest
from repository import REPOSITORY

from trainer.config import QUICKSTART, RowKeys, sources_of
from trainer.train.start.compose import load_config

RECIPES = sorted(path.stem for path in (REPOSITORY / "conf/experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_stands_alone(name):
    config = load_config([f"experiment={name}"])
    defaults = load_config([])
    assert config.data.train_files != QUICKSTART
    assert config.model.partial_pretrain != QUICKSTART
    assert config.trainer.default_local_dir != defaults.trainer.default_local_dir
    assert config.data.val_files is not None or config.data.val_ratio > 0


def test_the_mixture_names_its_sources():
    code, math = sources_of(load_config(["experiment=mixture"]).data, "train_files")
    assert (code.name, code.repeat, code.keys) == ("code", 1.0, RowKeys())
    keys = RowKeys(prompt_key="question", response_key="answer")
    assert (math.name, math.repeat, math.keys) == ("math", 2.5, keys)


@pytest.mark.covers("S3.12 S3.15 S3.24 S3.26")
def test_the_coder_recipe_is_as_required():
    """The requirement fixes these values of the recipe for the 7B coder."""
    coder = load_config(["experiment=phase1_sft_qwen7b_coder"])
    run_dir = "checkpoints/rlvr_coding_model/phase1_sft_qwen7b_coder"
    assert coder.trainer.default_local_dir == run_dir
    assert (coder.trainer.save_freq, coder.trainer.test_freq) == (500, 500)
    assert (coder.trainer.max_ckpt_to_keep, coder.trainer.resume_mode) == (5, "auto")
    assert coder.trainer.logger == ["console", "wandb"]
    assert coder.trainer.checkpoint.save_contents == ["model", "optimizer", "extra", "hf_model"]
    assert (coder.data.max_length, coder.data.val_files, coder.data.val_ratio) == (4096, None, 0.02)
    assert coder.data.truncation != "left" and "Qwen2.5-Coder-7B" in coder.model.partial_pretrain
