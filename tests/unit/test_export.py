"""Tests of an export that is written from a plan, without a model or a run."""

import pytest
import torch
from safetensors.torch import load_file
from small_files import read_json, write_json

from trainer.checkpoint.export import ExportSource, plan_export, write_export
from trainer.checkpoint.model_files import ModelFiles
from trainer.checkpoint.shards import Shards

WEIGHT = torch.tensor([1.0, 1 / 3])
BUFFER = torch.tensor([2.0, 1 / 7])
"""Values that bfloat16 would round."""


@pytest.fixture
def source(tmp_path):
    config = {"dtype": "float32", "text_config": {"dtype": "float32", "torch_dtype": "float32"}}
    directory = tmp_path / "model"
    directory.mkdir()
    write_json(directory / "config.json", config)
    return ExportSource(ModelFiles.read(directory), None, ())


def test_values_and_config_are_in_the_dtype_of_the_export(source, tmp_path):
    """Parameters and every dtype of the config; buffers keep theirs."""
    (target := tmp_path / "huggingface").mkdir()
    plan = plan_export({"weight": WEIGHT}, {"buffer": BUFFER}, None, source, dtype="bfloat16")
    write_export(plan, target, Shards(tmp_path, []), {"weight": WEIGHT, "buffer": BUFFER})
    found = load_file(target / "model.safetensors")
    assert found["weight"].dtype == torch.bfloat16 and torch.equal(
        found["weight"], WEIGHT.bfloat16()
    )
    assert found["buffer"].dtype == torch.float32 and torch.equal(found["buffer"], BUFFER)
    config = read_json(target / "config.json")
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert config["text_config"] == {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
