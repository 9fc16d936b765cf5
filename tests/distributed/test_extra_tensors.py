"""A text model's files may hold further tensors, for example for multi-token prediction:
exports carry them.
"""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import export_model, tensors_in
from families import VOCAB
from family_runs import prepare, words_of_run
from family_trials import heard, save_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy import differing, model_config
from transformers import AutoModelForCausalLM
from whole_runs import stop_in_step, train

from trainer.checkpoint.export import OTHER_PARTS, ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.checkpoint.offline_export import export_from_shards
from trainer.checkpoint.shards import weight_buffers
from trainer.model.assemble import build_model, design_model
from trainer.model.pretrained import ModelSource, whole_checkpoint

_EXPERT = "mlp.experts.0"
_PREDICTING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
_HEADS = ("shared_head.norm.weight", "shared_head.head.weight", "embed_tokens.weight")
EXTRA: dict[str, tuple[str, ...]] = {
    "qwen3_next": (
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        *(
            f"mtp.layers.0.{_EXPERT}.{name}.weight"
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
    ),
    "glm4_moe": tuple(
        f"model.layers.46.{name}"
        for name in (
            *_PREDICTING,
            *_HEADS,
            f"{_EXPERT}.gate_proj.weight",
            "self_attn.q_proj.weight",
        )
    ),
    "deepseek_v3": tuple(f"model.layers.2.{name}" for name in (*_PREDICTING, *_HEADS)),
    "qwen3_5_text": ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"),
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
            whole = whole_checkpoint(source)
            model: Any = build_model(
                design_model(model_config(random_weights=False), source, max_length=64),
                world=world,
                seed=1,
            )
        with torch.no_grad():
            for tensor in (*model.parameters(), *weight_buffers(model).values()):
                tensor.mul_(1.25)
        export_source = ExportSource(ModelFiles.read(Path(source.path)), None, (), whole)
        export_model(world, model, root / f"{name}-export", export_source, dtype="float32")
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
    theirs, ours = tensors_in(root / name), tensors_in(root / f"{name}-export")
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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("mtp")
    prepare(root, "qwen2")
    return root, add_tensors(root / "model", MTP)


def words_of(root: Path) -> tuple[str, ...]:
    return (*words_of_run(root, root / "model"), *FOUR_STEPS)


def require_carried(export: Path, added: dict[str, torch.Tensor]) -> None:
    tensors = tensors_in(export)
    assert not differing(added, {name: tensors[name] for name in added})
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_resumed_run_carries_them_and_so_does_an_export_afterwards(source, tmp_path):
    (root, added), run_dir = source, tmp_path / "run"
    kill = partial(stop_in_step, 4, signal.SIGKILL)
    train(run_dir, 2, *words_of(root), code=None, before=kill)
    train(run_dir, 2, *words_of(root))
    checkpoint = run_dir / "global_step_4"
    require_carried(checkpoint / "huggingface", added)
    export_from_shards(checkpoint, tmp_path / "afterwards", dtype="bfloat16")
    saved, afterwards = (
        {file.name: file.read_bytes() for file in path.iterdir()}
        for path in (checkpoint / "huggingface", tmp_path / "afterwards")
    )
    assert saved == afterwards


def test_merged_adapters_carry_them_and_adapters_alone_do_not(source, tmp_path):
    root, added = source
    train(tmp_path / "run", 2, *words_of(root), *LORA)
    checkpoint = tmp_path / "run" / "global_step_4"
    export_from_shards(checkpoint, tmp_path / "afterwards", dtype="bfloat16", lora="merged")
    for path in (checkpoint / "huggingface", tmp_path / "afterwards"):
        require_carried(path, added)
        assert not (path / OTHER_PARTS).exists()
    export_from_shards(checkpoint, tmp_path / "adapter", dtype="bfloat16", lora="adapter")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapter)
