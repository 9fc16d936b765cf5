"""Runs on the text part of a checkpoint with several parts are saved, resumed and exported like any
other.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from small_files import flip
from test_offline_export import contents
from toy_runs import Recipe, run
from transformers import AutoModelForMultimodalLM
from whole_models import write_whole_model

from trainer.checkpoint import layout
from trainer.checkpoint.export import OTHER_PARTS
from trainer.checkpoint.offline_export import export_from_shards
from trainer.config import ConfigError
from trainer.model.pretrained import ModelSource, whole_checkpoint

ONE_STEP = Recipe(total_steps=1)
NO_WEIGHTS = replace(ONE_STEP, checkpoint={"save_contents": ["model", "optimizer", "extra"]})


@pytest.fixture(scope="module")
def source(root):
    return write_whole_model(root, "gemma3")


def test_an_export_afterwards_needs_the_checkpoint_alone(source, tmp_path):
    """The export works with and without exported weights in the save, and without the source model.
    Damage is refused.
    """
    own = ModelSource(shutil.copytree(source.path, tmp_path / "own"))
    whole = whole_checkpoint(ModelSource(own.path))
    saved = run_ranks(run, 2, tmp_path / "bare", own, NO_WEIGHTS)[0]
    run_ranks(run, 2, tmp_path / "run", own, ONE_STEP)
    shutil.rmtree(own.path)
    bare = tmp_path / "bare" / "global_step_1"
    checkpoint = tmp_path / "run" / "global_step_1"
    manifest = layout.inspect(bare).manifest
    assert manifest.num_passed_through == len(whole.others)
    assert f"huggingface/{OTHER_PARTS}" in {record.path for record in manifest.files}
    assert (
        set(contents(bare / "huggingface"))
        & {"model-text.safetensors", "model.safetensors.index.json"}
        == set()
    )
    for path in (bare, checkpoint):
        export_from_shards(path, tmp_path / path.parent.name / "export", dtype="float32")
    exports = [contents(tmp_path / name / "export") for name in ("bare", "run")]
    assert exports[0] == exports[1] == contents(checkpoint / "huggingface")
    model, report = AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "bare" / "export", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    trained = model.model.language_model.layers[1].mlp.up_proj.weight
    assert torch.equal(trained, saved.parameters["model.layers.1.mlp.up_proj.weight"])
    export_from_shards(bare, tmp_path / "half", dtype="bfloat16")
    assert contents(tmp_path / "half")[OTHER_PARTS] == exports[0][OTHER_PARTS], (
        "whatever the dtype of the text"
    )
    assert {t.dtype for t in load_file(tmp_path / "half" / "model-text.safetensors").values()} == {
        torch.bfloat16
    }
    flip(bare / "huggingface" / OTHER_PARTS)
    with pytest.raises(ConfigError, match=f"is damaged: huggingface/{OTHER_PARTS} changed"):
        export_from_shards(bare, tmp_path / "damaged", dtype="float32")


def test_the_digest_covers_every_byte_that_passes_through(source, tmp_path):
    changed = ModelSource(shutil.copytree(source.path, tmp_path / "own"))
    whole = whole_checkpoint(source)
    name, stored = next(
        (name, tensor) for name, tensor in whole.others.items() if tensor.dtype == "F32"
    )
    data = bytearray((file := tmp_path / "own" / "model.safetensors").read_bytes())
    place = data.find(stored.whole().numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    found = whole_checkpoint(changed)
    assert name in found.others and found.others_digest != whole.others_digest
