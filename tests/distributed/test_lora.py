"""LoRA and frozen parameters in whole runs: any number of ranks, kills, a different base, and the
contents of huggingface/.

The base has random weights, stored as a file. Its output does not matter here, but it must be equal
everywhere.
"""

import re
import shutil

import pytest
import torch
from exports import export_adapted, tensors_in
from family_runs import prepare, words_of_run
from family_trials import save_model
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from test_offline_export import contents
from torch.distributed.tensor import Shard
from toy import build_toy_model, change_tensors, differing, write_weights
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from whole_models import write_whole_model
from whole_runs import tiny_model, train

from trainer.checkpoint import layout
from trainer.checkpoint.offline_export import export_from_shards
from trainer.checkpoint.shards import read_torch
from trainer.model.pretrained import ModelSource

LORA = (
    "model.lora_rank=4",
    "model.use_rslora=true",
    "optim.lr=0.01",
    "trainer.checkpoint.export_dtype=float32",
)
RECIPE = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=-1")
MERGED = "trainer.checkpoint.save_contents=[model,optimizer,extra,merged_model]"
FREEZE = (
    "model.freeze=[embed_tokens,mlp]",
    "optim.lr=0.01",
    "trainer.checkpoint.export_dtype=float32",
)


@pytest.fixture(scope="module")
def words(root):
    made = tiny_model(root)
    write_weights(root / "model")
    return (*(word for word in made if "random_weights" not in word), *RECIPE)


@pytest.fixture(scope="module")
def straight(words, root):
    """{case: run directory}."""
    train(root / "lora 1", 1, *words, *LORA, MERGED)
    train(root / "lora 2", 2, *words, *LORA)
    train(root / "freeze", 2, *words, *FREEZE)
    return {name: root / name for name in ("lora 1", "lora 2", "freeze")}


def test_a_checkpoint_holds_adapters_and_their_moments_alone(straight):
    checkpoint = straight["lora 2"] / "global_step_4"
    manifest = layout.inspect(checkpoint).manifest
    assert len(manifest.tensors) == 14
    assert all(".lora_" in name for name in manifest.tensors)
    assert len(manifest.fingerprints["base_weights"]) == 64
    model, optimizer = (
        read_torch(checkpoint / file(2, 1)) for file in (layout.model_file, layout.optim_file)
    )
    assert set(model) == set(optimizer["state"]) == set(manifest.tensors)
    names = {path.name for path in (checkpoint / "huggingface").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names, (
        "transformers would take it for a whole model"
    )


def test_a_frozen_parameter_stays_and_is_saved_without_moments(straight, root):
    checkpoint = straight["freeze"] / "global_step_4"
    before, after = (
        load_file(path / "model.safetensors")
        for path in (root / "model", checkpoint / "huggingface")
    )
    frozen = {name for name in before if "embed_tokens" in name or "mlp" in name}
    assert before.keys() == after.keys() and len(frozen) == 4
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name in frozen), name
    moments = read_torch(checkpoint / layout.optim_file(2, 0))["state"]
    saved = read_torch(checkpoint / layout.model_file(2, 0))
    assert set(saved) - set(moments) - {"lm_head.weight"} == frozen
    assert {tuple(tensor.placements) for tensor in saved.values()} == {(Shard(0),)}, (
        "also of what is not sharded"
    )


ADAPTER = "adapter_model.safetensors"


def change_norm(tensors):
    tensors["model.norm.weight"][0] += 1e-3


def test_an_export_afterwards_is_that_of_the_save(straight, root, tmp_path):
    checkpoint = straight["lora 1"] / "global_step_4"
    moved = tmp_path / "moved"
    other = straight["lora 2"] / "global_step_4"
    export_from_shards(checkpoint, tmp_path / "merged", dtype="float32")
    export_from_shards(other, tmp_path / "adapter", dtype="float32", lora="adapter")
    assert contents(tmp_path / "merged") == contents(checkpoint / "huggingface")
    assert contents(tmp_path / "adapter") == contents(other / "huggingface")
    shutil.copytree(root / "model", moved)
    export_from_shards(checkpoint, tmp_path / "of another place", dtype="float32", base=moved)
    assert contents(tmp_path / "of another place") == contents(tmp_path / "merged")
    change_tensors(moved / "model.safetensors", change_norm)
    with pytest.raises(
        Exception, match=r"not contain the weights on which the adapters in .* were trained"
    ):
        export_from_shards(checkpoint, tmp_path / "never", dtype="float32", base=moved)


def test_another_base_or_another_adapter_is_refused(words, straight, root, tmp_path):
    shutil.copytree(straight["lora 1"], tmp_path / "run")
    shutil.copytree(root / "model", tmp_path / "model")
    change_tensors(tmp_path / "model" / "model.safetensors", change_norm)
    other = [
        f"model.partial_pretrain={tmp_path}/model" if "partial_pretrain" in word else word
        for word in words
    ]
    longer = "trainer.total_training_steps=5"
    output = train(tmp_path / "run", 1, *other, *LORA, longer, code=2)
    assert (
        "base_weights" in output and "adapters fit only the weights they were trained on" in output
    )
    output = train(tmp_path / "run", 1, *words, *LORA, longer, "model.lora_alpha=32", code=2)
    assert "model.lora_alpha: 16 -> 32   <- refused" in output and "resume_allow" not in output


def test_another_scaling_in_the_initial_adapter_is_refused(words, straight, tmp_path):
    run_dir = shutil.copytree(straight["lora 1"], tmp_path / "run")
    adapter = shutil.copytree(
        straight["lora 2"] / "global_step_4/huggingface", tmp_path / "adapter"
    )
    settings = adapter / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 16', '"lora_alpha": 64'))
    begins = (f"model.lora_adapter_path={adapter}", "trainer.total_training_steps=5")
    output = train(run_dir, 1, *words, *LORA, *begins, code=2)
    assert re.search("adapter_scaling: lora_alpha=16, .* -> lora_alpha=64, .*<- refused", output)


def trained(root, model, *words):
    """The export at the end of a run with adapters of rank 4. `test_meetings.py` covers resumes and
    runs that start from an adapter.
    """
    train(root / "run", 2, *words_of_run(root, model), "model.lora_rank=4", *words)
    return root / "run" / "global_step_6" / "huggingface"


def assert_merged_as_by_peft(model, adapter, merged):
    """The export has the tensors of the base model's files, with the values of peft's own merge.
    Return the names of those that changed.
    """
    has_parts = "vision_config" in (model / "config.json").read_text(encoding="utf-8")
    loader = AutoModelForMultimodalLM if has_parts else AutoModelForCausalLM
    base = tensors_in(model)
    ours = tensors_in(merged)
    changed = set(differing(base, ours))
    assert base.keys() == ours.keys() and set() < changed < base.keys()

    adapted = PeftModel.from_pretrained(loader.from_pretrained(model, dtype=torch.float32), adapter)
    expected = adapted.merge_and_unload()
    loaded, info = loader.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)
    return changed


def export_merged(world, model, target, layers):
    source = ModelSource(str(model))
    lora = {"lora_rank": 3, "use_rslora": True, "target_modules": layers}
    # their product must not be rounded to bfloat16, too
    lora["master_dtype"] = "bfloat16"
    built = build_toy_model(
        world, source, random_weights=False, partial_pretrain=source.path, **lora
    )
    export_adapted(world, built, source, target, dtype="float32")


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("deepseek_v3", "all-linear"),
        ("mamba2", "all-linear"),
        ("mixtral", ["o_proj", "experts.down_proj"]),
        ("gpt_oss", ["o_proj", "experts.gate_up_proj", "experts.down_proj"]),
        ("deepseek_v3", ["o_proj", "gate_proj", "experts.gate_up_proj", "experts.down_proj"]),
        ("qwen3_5_moe", ["o_proj", "experts.gate_up_proj", "experts.down_proj"]),
    ],
)
def test_adapters_are_merged_as_peft_does(tmp_path, family, layers):
    """All linear layers include those whose names peft takes for experts. Files hold single experts
    (mixtral, deepseek_v3) or stacked ones, transposed in gpt_oss; qwen3_5_moe is the language model
    of a checkpoint of several parts.
    """
    model = tmp_path / "model"
    if family == "qwen3_5_moe":
        write_whole_model(model, family)
    else:
        save_model(model, family)
    run_ranks(export_merged, 2, model, tmp_path / "export", layers)
    assert_merged_as_by_peft(model, tmp_path / "export-adapter", tmp_path / "export-merged")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"], ids=["tied", "several parts"])
def test_modules_trained_in_full_are_exported_for_peft(tmp_path, family):
    prepare(tmp_path, "qwen3")  # samples and tokenizer
    model = tmp_path / "model"
    if family == "qwen3":
        save_model(model, "qwen3", tie_word_embeddings=True)
    else:
        write_whole_model(model, family)
    alone = trained(tmp_path, model, "model.modules_to_save=[embed_tokens,lm_head]")
    ends = {name.split(".")[-2] for name in load_file(alone / ADAPTER) if ".lora_" not in name}
    assert ends == {"embed_tokens", "lm_head"}
    merged = tmp_path / "merged"
    export_from_shards(alone.parent, merged, dtype="float32")
    assert any("embed_tokens" in name for name in assert_merged_as_by_peft(model, alone, merged))


def test_a_run_on_nf4_weights_is_never_continued_on_plain_ones(tmp_path):
    prepare(tmp_path, "qwen3")  # samples and tokenizer
    model = tmp_path / "model"
    save_model(model, "qwen3", hidden_size=64, intermediate_size=128)
    run_dir = trained(tmp_path, model, "model.load_in_4bit=true").parents[1]
    words = (*words_of_run(tmp_path, model), "model.lora_rank=4")
    output = train(run_dir, 2, *words, "trainer.total_training_steps=8", code=2)
    assert "model.load_in_4bit: True -> False   <- refused" in output
