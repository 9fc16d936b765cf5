"""QLoRA: NF4 weights by their definition, and training on them as on a plain dequantized base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import each, run_ranks
from sweeps import short_or_full
from test_adapters import plain_model, write_adapter
from test_invariance import plain_run, train
from toy import relative, write_model_config
from transformers import AutoModelForCausalLM

from trainer.model import nf4
from trainer.model.pretrained import ModelSource

COMPILING_S = 300.0
"""Compiling takes a minute on an idle machine without a cache."""


def defined(weight: torch.Tensor) -> torch.Tensor:
    """The nearest level of each weight times the scale of its block, in float64."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(nf4.LEVELS, dtype=torch.float64)
    distances = (blocks[..., None] - levels * scales[..., None]).abs()
    return (levels[distances.argmin(-1)] * scales).reshape(weight.shape)


def stored_and_back(weight: torch.Tensor) -> torch.Tensor:
    return nf4.dequantized(nf4.quantized(weight), torch.tensor(nf4.LEVELS), weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_the_nearest_level_times_the_scale_of_its_block(dtype):
    weight = (0.02 * torch.randn(96, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight[3, :64] = 0.0
    weight[5, 7] = 100.0
    assert torch.equal(stored_and_back(weight), defined(weight).float().to(dtype))
    assert nf4.quantized(weight).nbytes * 8 == 4.5 * weight.numel()
    assert torch.equal(nf4.quantized(weight)[32:], nf4.quantized(weight[32:])), "rows stand alone"


@pytest.fixture
def bases(tmp_path: Path) -> tuple[ModelSource, ModelSource]:
    """A model, and a model with the weights that its linear layers have in NF4."""
    shape = {"intermediate_size": 128, "attention_bias": True}
    paths = [tmp_path / "model", tmp_path / "dequantized"]
    for path in paths:
        source = write_model_config(path, "qwen3", **shape)
        torch.manual_seed(0)
        model = plain_model(source.path)
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                if layer.bias is not None:
                    torch.nn.init.normal_(layer.bias)
                if path == paths[1]:
                    layer.weight.data = stored_and_back(layer.weight.data)
        model.save_pretrained(path)
    return ModelSource(str(paths[0])), ModelSource(str(paths[1]))


def test_adapters_train_as_in_a_plain_loop_with_peft_on_the_dequantized_base(bases, tmp_path):
    base, dequantized = bases
    loaded = AutoModelForCausalLM.from_pretrained(dequantized.path)
    adapter = write_adapter(loaded, tmp_path / "adapter")
    expected = plain_run(dequantized, adapter)
    own = {"lora_adapter_path": adapter, "random_weights": False, "load_in_4bit": True}
    ways = {
        "packed": {},
        "micro-batches": {"max_samples": 1},
        "recomputed": {"enable_gradient_checkpointing": True},
        "recomputed in part": {"enable_gradient_checkpointing": "selective"},
        "freed": {"reshard_after_forward": True},
    }
    one_rank: dict[str, Any] = short_or_full({"packed": {}}, full={"compiled": {"compile": True}})
    for num_ranks, more in ((1, one_rank), (2, ways)):
        variants = {way: {**own, **changes} for way, changes in more.items()}
        ranks = run_ranks(each, num_ranks, train, base, variants, timeout_s=COMPILING_S)
        for way, found in ranks[0].items():
            assert relative(found[0], expected["train/loss"]) < 1e-6, way
            assert relative(found[1], expected["train/grad_norm"]) < 1e-5, way
