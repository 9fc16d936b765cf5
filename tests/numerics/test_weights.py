"""Weights in every form they are found in, and files that are wrong: never silently another
model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exports import export_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy import model_config, write_model_config
from transformers import AutoConfig, AutoModelForCausalLM, logging

from trainer.checkpoint import export
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.config import ConfigError
from trainer.model import assemble
from trainer.model.pretrained import ModelSource

Files = dict[str, torch.Tensor]


def save_model(
    path: Path, model_type: str = "qwen2", *, max_shard_size: str = "1GB", **changes: Any
) -> Any:
    write_model_config(path, model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def rewrite(path: Path, change: Callable[[Files], Files]) -> None:
    """Change the tensors of a model that is saved in one file."""
    tensors = change(load_file(path / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )


def load_each(world: Any, paths: dict[str, Path]) -> dict[str, Any]:
    """{case: names of tensors that differ from what transformers loads, or the refusal}."""
    logging.disable_progress_bar()
    results: dict[str, Any] = {}
    for case, path in paths.items():
        try:
            model = sharded(world, path)
        except ConfigError as error:
            results[case] = str(error)
            continue
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        ours = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        results[case] = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    return results


def sharded(world: Any, path: Path) -> Any:
    source = ModelSource(str(path))
    design = assemble.design_model(model_config(), source, max_length=64)
    assemble.prepare(design.model, design.config, source, world=world, seed=1)
    return design.model


def test_every_usual_form_loads(tmp_path: Path) -> None:
    paths = {
        name: tmp_path / name
        for name in (
            "one file",
            "several files",
            "head repeated",
            "only the head",
            "bfloat16",
            "old names",
        )
    }
    for name in ("one file", "head repeated", "only the head", "bfloat16"):
        save_model(paths[name])
    save_model(paths["several files"], max_shard_size="40KB", tie_word_embeddings=False)
    assert len(list(paths["several files"].glob("*.safetensors"))) > 2
    embedding = "model.embed_tokens.weight"
    rewrite(
        paths["head repeated"], lambda files: {**files, "lm_head.weight": files[embedding].clone()}
    )
    rewrite(paths["only the head"], lambda files: {"lm_head.weight": files.pop(embedding), **files})
    rewrite(
        paths["bfloat16"], lambda files: {name: tensor.bfloat16() for name, tensor in files.items()}
    )
    save_model(paths["old names"], "gpt2")
    rewrite(
        paths["old names"],
        lambda files: {
            **{name.removeprefix("transformer."): tensor for name, tensor in files.items()},
            "h.0.attn.bias": torch.ones(1, 1, 4, 4).tril(),
        },
    )
    found = run_ranks(load_each, 2, paths)
    assert found[0] == found[1] == {name: [] for name in paths}


def break_files(root: Path) -> dict[str, tuple[Path, list[str]]]:
    """{fault: (directory, what the message must name)}."""
    faults = {
        "wrong shape": ["model.norm.weight", "(9,)", "(64,)", "model.safetensors"],
        "missing tensor": ["model.norm.weight", "random_weights=true"],
        "missing file": ["model-00002-of-", "not there"],
        "cut file": ["model.safetensors", "cannot be read"],
        "own head under a config that ties": ["lm_head.weight", "tie_word_embeddings"],
        "the same, renamed": ["embeddings", "tie_word_embeddings"],
        "fp8": ["model.norm.weight", "F8_E4M3"],
        "quantized": ["quantization_config"],
        "several parts": ["qwen3_vl", "several parts"],
        "no weights": ["cannot be loaded"],
    }
    paths = {fault: root / fault for fault in faults}
    for fault in faults.keys() - {"missing file", "several parts", "the same, renamed"}:
        save_model(paths[fault])
    rewrite(paths["wrong shape"], lambda files: {**files, "model.norm.weight": torch.ones(9)})
    rewrite(
        paths["missing tensor"],
        lambda files: {k: v for k, v in files.items() if k != "model.norm.weight"},
    )
    rewrite(
        paths["own head under a config that ties"],
        lambda files: {**files, "lm_head.weight": torch.ones(160, 64)},
    )
    save_model(paths["the same, renamed"], "gpt2")
    rewrite(
        paths["the same, renamed"],
        lambda files: {
            **{name.removeprefix("transformer."): tensor for name, tensor in files.items()},
            "lm_head.weight": torch.ones(160, 64),
        },
    )
    rewrite(
        paths["fp8"],
        lambda files: {**files, "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)},
    )
    save_model(paths["missing file"], max_shard_size="40KB")
    next(paths["missing file"].glob("model-00002-of-*")).unlink()
    whole = (paths["cut file"] / "model.safetensors").read_bytes()
    (paths["cut file"] / "model.safetensors").write_bytes(whole[:-100])
    config = json.loads((paths["quantized"] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (paths["quantized"] / "config.json").write_text(json.dumps(config))
    paths["several parts"].mkdir()
    AutoConfig.for_model("qwen3_vl").save_pretrained(paths["several parts"])
    (paths["no weights"] / "model.safetensors").unlink()
    return {fault: (paths[fault], words) for fault, words in faults.items()}


def test_every_fault_is_named(tmp_path: Path) -> None:
    faults = break_files(tmp_path)
    found = run_ranks(load_each, 2, {fault: path for fault, (path, _) in faults.items()})
    assert found[0] == found[1]
    for fault, (_, words) in faults.items():
        message = found[0][fault]
        assert isinstance(message, str), (fault, message)
        assert all(word in message for word in words), (fault, message)


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"model_type": "no such"}', '{"model_type": "qwen2", "hidden_size": "wide"}'],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    source = ModelSource(str(tmp_path), random_weights=True)
    with pytest.raises(ConfigError, match="no usable config"):
        assert source.config


def export_in_parts(world: Any, path: Path, target: Path, dtype: str) -> list[tuple[str, int]]:
    model = sharded(world, path)
    with patch.object(export, "MAX_FILE_BYTES", 20_000):
        records = export_model(
            world, model, target, ExportSource(ModelFiles.read(path), None, ()), dtype=dtype
        )
    return [(record.path, record.size_bytes) for record in records]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_of_several_files_loads(tmp_path: Path, model_type: str, dtype: str) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = save_model(
        tmp_path / "source", model_type, **(experts if model_type == "qwen3_moe" else {})
    )
    target = tmp_path / "export" / "huggingface"
    target.parent.mkdir()
    written = run_ranks(export_in_parts, 2, tmp_path / "source", target, dtype)
    assert {path.endswith(".safetensors") for path, _ in written[1]} == {True}, (
        "every rank writes a share"
    )
    assert {(path, size) for rank in written for path, size in rank} == {
        (f"huggingface/{file.name}", file.stat().st_size) for file in target.iterdir()
    }
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target, dtype="auto", output_loading_info=True
    )
    assert not any(loaded[1].values()), loaded[1]
    assert loaded[0].dtype == getattr(torch, dtype)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[0].state_dict()[name], tensor.to(getattr(torch, dtype))), name
    shutil.rmtree(target)
