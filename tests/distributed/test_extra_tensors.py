"""A text model's files may hold further tensors, for example for multi-token prediction:
exports carry them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from exports import export_changed, tensors_in
from families import VOCAB
from family_runs import prepare, words_of_run
from family_trials import heard, save_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy import build, differing
from transformers import AutoModelForCausalLM
from whole_runs import train

from trainer.checkpoint.export import OTHER_PARTS
from trainer.checkpoint.offline_export import export_from_shards
from trainer.model.pretrained import ModelSource, whole_checkpoint

EXTRA: dict[str, tuple[str, ...]] = {
    "qwen3_next": (
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
    ),
    "deepseek_v3": (
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.norm.weight",
        "model.layers.2.embed_tokens.weight",
    ),
}
"""{family: names as its released checkpoints have them}; the whole qwen3_5 is in
test_whole_models.py.
"""


def add_tensors(model: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Random ones, half of them in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    added = {name: torch.randn(VOCAB, 4, generator=generator) for name in names}
    added |= {name: added[name].bfloat16() for name in names[::2]}
    save_file(
        load_file(model / "model.safetensors") | added,
        model / "model.safetensors",
        {"format": "pt"},
    )
    return added


def export_all(world: Any, root: Path) -> dict[str, Any]:
    """{family: what was logged}, each exported after a change of every parameter, in float32.
    Collective.
    """
    said = {}
    for name in EXTRA:
        source = ModelSource(str(root / name))
        with heard() as lines:
            model = build(world, source, random_weights=False)
            export_changed(world, model, source, root / f"{name}-export")
        said[name] = lines
    return said


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("extra")
    for name, extra in EXTRA.items():
        save_model(root / name, name)
        add_tensors(root / name, extra)
    return root, run_ranks(export_all, 2, root, timeout_s=300)[0]


@pytest.mark.parametrize("name", EXTRA)
def test_every_tensor_is_in_the_export(exported, name):
    root, said = exported
    theirs = tensors_in(root / name)
    ours = tensors_in(root / f"{name}-export")
    assert ours.keys() == theirs.keys()
    assert ours.keys() - set(differing(ours, theirs)) == set(EXTRA[name])
    (line,) = [line for line in said[name] if "carry them unchanged" in line]
    assert f"{len(EXTRA[name])} tensors" in line and min(EXTRA[name]) in line
    _, report = AutoModelForCausalLM.from_pretrained(
        root / f"{name}-export", output_loading_info=True
    )
    assert not report.pop("unexpected_keys") - set(EXTRA[name])
    assert not any(report.values()), report


def test_a_tied_head_that_is_stored_twice_is_named_and_never_exported_as_it_was(
    tmp_path,
):
    save_model(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with heard() as lines:
        assert whole_checkpoint(ModelSource(str(tmp_path))) is None
    assert [line for line in lines if "lm_head.weight" in line and "exports hold it once" in line]


MTP = ("mtp.fc.weight", "mtp.norm.weight")
FOUR_STEPS = ("trainer.total_training_steps=4", "trainer.checkpoint.export_dtype=bfloat16")
LORA = (
    "model.lora_rank=4",
    "trainer.checkpoint.save_contents=[model,optimizer,extra,merged_model]",
)


def test_merged_adapters_carry_them_and_adapters_alone_do_not(tmp_path):
    prepare(tmp_path, "qwen2")
    added = add_tensors(tmp_path / "model", MTP)
    words = words_of_run(tmp_path, tmp_path / "model")
    train(tmp_path / "run", 2, *words, *FOUR_STEPS, *LORA)
    checkpoint = tmp_path / "run" / "global_step_4"
    export_from_shards(checkpoint, tmp_path / "afterwards", dtype="bfloat16", lora="merged")
    for path in (checkpoint / "huggingface", tmp_path / "afterwards"):
        tensors = tensors_in(path)
        assert not differing(added, {name: tensors[name] for name in added})
        assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
        assert not (path / OTHER_PARTS).exists()
    export_from_shards(checkpoint, tmp_path / "adapter", dtype="bfloat16", lora="adapter")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapter)
