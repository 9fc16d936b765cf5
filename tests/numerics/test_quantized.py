"""Quantized checkpoints load as transformers dequantizes them, and export as bfloat16."""

import pytest
import torch
from exports import export_adapted, export_model, tensors_in
from peft import PeftModel
from quantized_files import PREDICTING, write
from ranks import run_ranks
from small_files import read_json
from torch.distributed.tensor import DTensor
from toy import build, change_tensors, differing, whole
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.config import ConfigError
from trainer.model import nf4
from trainer.model.adapter_names import base_name
from trainer.model.pretrained import ModelSource, whole_checkpoint
from trainer.model.quantized import weights_in

DEQUANTIZED = {
    "blocks": FineGrainedFP8Config(dequantize=True),
    "experts": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
}
"""Forms that transformers itself dequantizes."""
FORMS = ("blocks", "cut blocks", "exponents", "tensor", "channel", "block", "experts", "mxfp4")


def nf4_weights(world, path):
    """The weights in NF4, by their names in the files."""
    model = build(
        world, ModelSource(str(path)), random_weights=False, lora_rank=4, load_in_4bit=True
    )
    return {
        base_name(name): whole(tensor)
        for name, tensor in model.named_parameters()
        if nf4.is_nf4(tensor)
    }


def load_and_export(world, root):
    """Return the weights of each model; export each."""
    results = {}
    for form in FORMS:
        source = ModelSource(str(root / form))
        model = build(world, source, random_weights=False)
        results[form] = {
            name: whole(tensor).bfloat16() if isinstance(tensor, DTensor) else tensor
            for name, tensor in model.state_dict().items()
        }
        export_source = ExportSource(
            ModelFiles.read(root / form), None, (), whole_checkpoint(source)
        )
        target = root / f"{form}-export"
        export_model(world, model, target, export_source, dtype="bfloat16")
    return results


@pytest.fixture(scope="module")
def expected(root):
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


def test_nf4_weights_are_those_of_the_dequantized_weight(root, expected):
    found, _ = run_ranks(nf4_weights, 2, root / "blocks")
    assert len(found) > 4
    for name, stored in found.items():
        assert torch.equal(stored, nf4.quantized(expected["blocks"][name])), name


def test_models_train_on_and_exports_are_bfloat16_without_a_trace(root, expected):
    loaded = run_ranks(load_and_export, 2, root, timeout_s=300)[0]
    for form in FORMS:
        target = root / f"{form}-export"
        assert not differing(tensors_in(target), expected[form]), form
        config = read_json(target / "config.json")
        assert "quantization_config" not in config
        model, info = AutoModelForCausalLM.from_pretrained(
            target, dtype="auto", output_loading_info=True
        )
        assert set(info["unexpected_keys"]) <= {PREDICTING}, form
        assert not info["missing_keys"] and not info["mismatched_keys"], (form, info)
        assert not differing(loaded[form], model.state_dict()), form
        if form in DEQUANTIZED:
            theirs = AutoModelForCausalLM.from_pretrained(
                root / form, dtype=torch.bfloat16, quantization_config=DEQUANTIZED[form]
            )
            assert not differing(model.state_dict(), theirs.state_dict()), form


def adapt_and_merge(world, path, target, layers):
    source = ModelSource(str(path))
    lora = {"lora_rank": 4, "target_modules": layers, "partial_pretrain": source.path}
    model = build(world, source, random_weights=False, **lora)
    export_adapted(world, model, source, target, dtype="bfloat16")


EXPERTS = ["o_proj", "experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("form", "layers"), [("blocks", "all-linear"), ("experts", EXPERTS), ("mxfp4", EXPERTS)]
)
def test_adapters_are_merged_with_the_dequantized_base(root, expected, form, layers):
    run_ranks(adapt_and_merge, 2, root / form, root / f"{form}-lora", layers, timeout_s=300)
    assert tensors_in(root / f"{form}-lora-merged").keys() == expected[form].keys()
    base = AutoModelForCausalLM.from_pretrained(
        root / form, dtype=torch.bfloat16, quantization_config=DEQUANTIZED[form]
    )
    adapted = PeftModel.from_pretrained(base.float(), root / f"{form}-lora-adapter")
    theirs = adapted.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(root / f"{form}-lora-merged", dtype=torch.float32)
    torch.testing.assert_close(ours.state_dict(), theirs, rtol=1e-2, atol=1e-3)


def test_the_exponent_255_of_a_scale_is_nan(tmp_path):
    write(tmp_path, "exponents")
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(
        tmp_path / "model.safetensors", lambda files: files[f"{name}_scale_inv"].fill_(255)
    )
    assert weights_in(tmp_path)[name].whole().isnan().all()


def drop_scales(files):
    for name in [name for name in files if name.endswith("_scale_inv")]:
        del files[name]


def widen_grid(files):
    files.update({name: torch.ones(5, 5) for name in files if name.endswith("_scale_inv")})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_scales, "its scales are missing"),
        (widen_grid, "no block size fits both"),
    ],
)
def test_codes_whose_scales_do_not_fit_are_refused(tmp_path, change, reason):
    write(tmp_path, "blocks")
    change_tensors(tmp_path / "model.safetensors", change)
    with pytest.raises(ConfigError, match=reason):
        weights_in(tmp_path)
