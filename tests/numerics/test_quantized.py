"""Quantized checkpoints load as transformers dequantizes them, and export as bfloat16."""

import json
import math
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import export_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy import EXPERTS, build, write_model_config
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from trainer.checkpoint.base_weights import Adapter
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.config import ConfigError
from trainer.model import adapters
from trainer.model.pretrained import ModelSource, whole_checkpoint
from trainer.model.quantized import weights_in

Files = dict[str, torch.Tensor]
BLOCK = 32
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The 4-bit floats without their sign."""
PREDICTING = "mtp.layers.0.proj.weight"
"""A weight that transformers' class does not have; exports carry it."""


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, **weights}}
    settings = {"format": "float-quantized", "config_groups": {"group_0": group}}
    return {"quant_method": "compressed-tensors", **settings}


def in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes and the scale of each block, one block after the other."""
    rows, columns = weight.shape
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            place = (
                slice(down * block[0], (down + 1) * block[0]),
                slice(across * block[1], (across + 1) * block[1]),
            )
            scales[down, across] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[down, across]).to(torch.float8_e4m3fn)
    return codes, scales


def plain(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = codes.shape
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (codes.float() * spread[:rows, :columns]).bfloat16()


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return (
        tensor.ndim == 2 and "embed" not in name and "lm_head" not in name and "gate.w" not in name
    )


def write_float8(
    path: Path, form: str, model_type: str = "qwen3", **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a model in float8, in one of several forms. Returns its tensors in bfloat16."""
    write_model_config(path, model_type, tie_word_embeddings=False, **changes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.bfloat16().save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | {PREDICTING: torch.randn(40, 64).bfloat16()}
    files: Files = {}
    expected: Files = {}
    for name, tensor in tensors.items():
        if not is_linear(name, tensor):
            files[name] = expected[name] = tensor
            continue
        rows, columns = tensor.shape
        block = {"tensor": (rows, columns), "channel": (1, columns)}.get(form, (BLOCK, BLOCK))
        codes, scales = in_blocks(tensor.float(), block)
        suffix = "_scale" if form in ("tensor", "channel", "block") else "_scale_inv"
        if form == "exponents":
            exponents = (scales.log2().ceil() + 127).to(torch.uint8)
            scales, files[name + suffix] = torch.exp2(exponents.float() - 127), exponents
        else:
            files[name + suffix] = scales.reshape(1) if form == "tensor" else scales
        files[name], expected[name] = codes, plain(codes, scales, block)
        if form == "tensor":
            files[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(files, path / "model.safetensors", {"format": "pt"})
    settings = FLOAT8
    if form in ("tensor", "channel", "block"):
        more = {"block_structure": [BLOCK, BLOCK]} if form == "block" else {}
        settings = compressed(strategy=form, **more)
    set_quantization(path, settings)
    return expected


def write_mxfp4(path: Path) -> dict[str, torch.Tensor]:
    """Write a tiny gpt-oss as it is released. Returns its tensors in bfloat16."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    write_model_config(path, "gpt_oss", tie_word_embeddings=False, **experts)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.bfloat16().save_pretrained(path)
    expected = load_file(path / "model.safetensors")
    files = dict(expected)
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)])
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = files.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16)).byte()
        scales = torch.randint(115, 125, blocks.shape[:3]).byte()
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        low, high = signed[(blocks % 16).long()], signed[(blocks // 16).long()]
        pairs = torch.stack([low, high], -1).flatten(-2)
        values = pairs * (2.0 ** (scales.float() - 127))[..., None]
        expected[name] = values.flatten(-2).transpose(1, 2).bfloat16()
    save_file(files, path / "model.safetensors", {"format": "pt"})
    set_quantization(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected


def set_quantization(path: Path, settings: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write(path: Path, form: str) -> dict[str, torch.Tensor]:
    if form == "mxfp4":
        return write_mxfp4(path)
    if form == "experts":
        return write_float8(path, "blocks", "qwen3_moe", **EXPERTS)
    if form == "cut blocks":
        return write_float8(path, "blocks", intermediate_size=80)
    return write_float8(path, form)


FORMS = ("blocks", "cut blocks", "exponents", "tensor", "channel", "block", "experts", "mxfp4")


def different(found: Files, expected: Files) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def load_and_export(world: Any, root: Path) -> dict[str, tuple[float, Files]]:
    """Return loss, and weights of each model; export each."""
    results = {}
    for form in FORMS:
        source = ModelSource(str(root / form))
        model = build(world, source, random_weights=False)
        weights = {
            name: tensor.full_tensor().bfloat16() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
        export_source = ExportSource(
            ModelFiles.read(root / form), None, (), whole_checkpoint(source)
        )
        target = root / f"{form}-export-{world.size}"
        export_model(world, model, target, export_source, dtype="bfloat16")
        results[form] = weights
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, Files]:
    return {form: write(root / form, form) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_every_slice_is_that_of_the_dequantized_weight(root, expected, form):
    found = weights_in(root / form)
    assert found.keys() == expected[form].keys()
    for name, tensor in expected[form].items():
        assert found[name].shape == tuple(tensor.shape) and found[name].dtype == "BF16", name
        assert torch.equal(found[name].whole(), tensor), name
        where = tuple(slice(size // 3, size - size // 4) for size in tensor.shape)
        assert torch.equal(found[name].read(where), tensor[where]), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_models_train_on_and_exports_are_bfloat16_without_a_trace(root, expected, num_ranks):
    loaded = run_ranks(load_and_export, num_ranks, root, timeout_s=300)[0]
    for form in FORMS:
        target = root / f"{form}-export-{num_ranks}"
        exported = [load_file(file) for file in target.glob("*.safetensors")]
        assert not different(dict(ChainMap(*exported)), expected[form]), form
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        assert "quantization_config" not in config
        model, info = AutoModelForCausalLM.from_pretrained(
            target, dtype="auto", output_loading_info=True
        )
        assert set(info["unexpected_keys"]) <= {PREDICTING}, form
        assert not info["missing_keys"] and not info["mismatched_keys"], (form, info)
        assert not different(loaded[form], model.state_dict()), form


@pytest.mark.parametrize("form", ["blocks", "experts", "mxfp4"])
def test_transformers_dequantizes_to_equal_weights(root, expected, form):
    how = {
        "mxfp4": Mxfp4Config(dequantize=True),
    }.get(form, FineGrainedFP8Config(dequantize=True))
    theirs = AutoModelForCausalLM.from_pretrained(
        root / form, dtype=torch.bfloat16, quantization_config=how
    )
    plain_path = root / f"{form}-plain"
    plain_path.mkdir()
    config = json.loads((root / form / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (plain_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = {name: tensor.whole() for name, tensor in weights_in(root / form).items()}
    save_file(stored, plain_path / "model.safetensors", {"format": "pt"})
    ours = AutoModelForCausalLM.from_pretrained(plain_path, dtype=torch.bfloat16)
    assert not different(ours.state_dict(), theirs.state_dict())


def adapt_and_merge(world: Any, path: Path, target: Path) -> None:
    model = build(
        world, ModelSource(str(path)), random_weights=False, lora_rank=4, partial_pretrain=str(path)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.05)
    adapter = Adapter(adapters.settings(model), path)
    source = ExportSource(ModelFiles.read(path), None, (), adapter=adapter)
    for kind in ("adapter", "merged"):
        export_model(world, model, target / kind, source, dtype="bfloat16", lora=kind)


def test_adapters_are_merged_with_the_dequantized_base(root, expected):
    target = root / "adapted"
    target.mkdir()
    run_ranks(adapt_and_merge, 2, root / "cut blocks", target, timeout_s=300)
    pairs = load_file(target / "adapter" / "adapter_model.safetensors")
    merged = load_file(target / "merged" / "model.safetensors")
    config = json.loads((target / "merged" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and merged.keys() == expected["cut blocks"].keys()
    num_adapted = 0
    for name, tensor in expected["cut blocks"].items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        sum_ = tensor
        if key.format("A") in pairs:
            added = pairs[key.format("B")].float() @ pairs[key.format("A")].float()
            sum_ = (tensor.float() + added * 4).bfloat16()
            num_adapted += 1
        torch.testing.assert_close(merged[name], sum_, rtol=1e-2, atol=1e-3)
    assert num_adapted == 14


def without_scales(files: Files) -> Files:
    return {name: tensor for name, tensor in files.items() if not name.endswith("_scale_inv")}


def with_wider_grid(files: Files) -> Files:
    return {
        name: torch.ones(5, 5) if name.endswith("_scale_inv") else tensor
        for name, tensor in files.items()
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_scales, "its scales are missing"), (with_wider_grid, "no block of rows and columns")],
)
def test_codes_whose_scales_do_not_fit_are_refused(tmp_path, change, reason):
    write_float8(tmp_path, "blocks")
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ConfigError, match=reason):
        weights_in(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        compressed(num_bits=4, type="int"),
    ],
)
def test_other_quantizations_are_refused_before_weights_are_read(tmp_path, settings):
    write_model_config(tmp_path)
    set_quantization(tmp_path, settings)
    with pytest.raises(ConfigError, match="is quantized"):
        _ = ModelSource(str(tmp_path)).config
