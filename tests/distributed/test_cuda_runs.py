"""Whole runs on a GPU: the losses of a CPU run, a bit-equal resume, and the released structures.

`SFT_TEST_DEVICE=cpu` runs these tests without a GPU, to check the tests themselves.
"""

import os

import pytest
import torch
from checkpoint_table import CHECKPOINTS, write_replica
from family_runs import interrupted_run, save_tokenizer, words_of_run, write_samples
from family_trials import save_model
from peft import LoraConfig, get_peft_model
from test_lora import assert_merged_as_by_peft
from toy import relative
from transformers import AutoModelForCausalLM
from whole_runs import train

from trainer.checkpoint.offline_export import export_from_shards
from trainer.tools.evaluate.prove import prove_serving
from trainer.tracking import read_metrics

DEVICE = os.environ.get("SFT_TEST_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

ON_CARD = (
    f"trainer.device={DEVICE}",
    "trainer.deterministic=true",
    "model.fsdp_config.param_dtype=bfloat16",
    "trainer.checkpoint.async_save=true",
    "data.num_workers=1",
    "optim.lr=1e-3",
)
ON_CPU = ("optim.lr=1e-3",)
IN_FLOAT32 = "model.fsdp_config.param_dtype=float32"
SETTINGS = {
    "as configured": (),
    "recomputed": ("model.enable_gradient_checkpointing=true",),
    "recomputed in part": ("model.enable_gradient_checkpointing=selective",),
    "inputs in host memory": ("model.enable_gradient_checkpointing=offload",),
    "parameters in host memory": ("model.fsdp_config.cpu_offload=true",),
    "parameters freed": ("model.fsdp_config.reshard_after_forward=true",),
    "documents alone": ("model.attention=per_document",),
    "bfloat16 state": ("optim.state_dtype=bfloat16", "model.master_dtype=bfloat16"),
    "Muon": ("optim.name=muon",),
    "LoRA": ("model.lora_rank=8",),
    "compiled": ("model.compile=true",),
    "compiled, recomputed in part": (
        "model.compile=true",
        "model.enable_gradient_checkpointing=selective",
    ),
    "compiled LoRA": ("model.compile=true", "model.lora_rank=8"),
    "LoRA on NF4": ("model.lora_rank=8", "model.load_in_4bit=true"),
    "compiled LoRA on NF4": (
        "model.compile=true",
        "model.lora_rank=8",
        "model.load_in_4bit=true",
    ),
}
CUDA_ONLY = ("model.compile", "model.enable_gradient_checkpointing", "model.fsdp_config")
"""Settings that must not change any number, so the run on the CPU omits them."""
NUM_COMPARED = 4
"""Steps to compare in bfloat16; rounding errors grow from step to step."""
BREAKS_TIES = ("deepseek-ai/DeepSeek-V3.2",)
"""The indexer picks the tokens that a query sees. Its scores are often equal (here for 22 of 304
picks), and then `topk` picks other tokens on a GPU than on a CPU.
"""
NUM_RANKS = [
    1,
    pytest.param(
        2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
    ),
]


@pytest.fixture(scope="module")
def model(root):
    """A Qwen3 with heads of 128, two query heads for each key head, and 32,000 tokens."""
    path = root / "model"
    save_model(
        path,
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        head_dim=128,
        vocab_size=32_000,
        initializer_range=0.02,
    )
    save_tokenizer(path)
    return path


def run(root, name, model, *words):
    """Train on one rank, and return the rows of the steps."""
    train(root / name, 1, *words_of_run(root, model), *words, timeout_s=300)
    return read_metrics(root / name / "metrics.jsonl")


def largest_difference(left, right, key):
    """Return the relative difference over the first steps."""
    ours, theirs = ([row[key] for row in rows[:NUM_COMPARED]] for rows in (left, right))
    return relative(ours, theirs)


def assert_equal_in_float32(root, model, *words):
    on_card = run(root, "on_card", model, *ON_CARD, IN_FLOAT32, *words)
    on_cpu = run(root, "on_cpu", model, *ON_CPU, *words)
    assert largest_difference(on_card, on_cpu, "train/loss") < 1e-5
    assert largest_difference(on_card, on_cpu, "train/grad_norm") < 1e-4


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_on_a_card_resumes_bit_for_bit_and_computes_what_a_cpu_does(
    tmp_path, model, setting, num_ranks
):
    """The CPU computes in float32; the GPU rounds to bfloat16."""
    write_samples(tmp_path / "samples.jsonl")
    words = SETTINGS[setting]
    assert interrupted_run(tmp_path, model, *ON_CARD, *words, num_ranks=num_ranks) == []
    plain = [word for word in words if not word.startswith(CUDA_ONLY)]
    on_cpu = run(tmp_path, "on_cpu", model, *ON_CPU, *plain)
    on_card = read_metrics(tmp_path / "straight" / "metrics.jsonl")
    assert largest_difference(on_card, on_cpu, "train/loss") < 5e-3
    assert largest_difference(on_card, on_cpu, "train/grad_norm") < 3e-2


@pytest.mark.parametrize("words", [(), ("model.lora_rank=8",), ("optim.name=muon",)])
def test_float32_on_a_card_equals_float32_on_a_cpu(tmp_path, model, words):
    write_samples(tmp_path / "samples.jsonl")
    assert_equal_in_float32(tmp_path, model, *words)


def test_adapters_of_experts_train_on_a_card_and_merge(tmp_path):
    base = tmp_path / "model"
    save_model(base, "qwen3_moe", hidden_size=256, head_dim=64, moe_intermediate_size=64)
    save_tokenizer(base)
    write_samples(tmp_path / "samples.jsonl")
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    settings = LoraConfig(
        r=4,
        target_modules=["q_proj", "o_proj"],
        target_parameters=experts,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapter = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(adapter)
    words = (f"model.lora_adapter_path={adapter}",)
    assert interrupted_run(tmp_path, base, *ON_CARD, *words, num_ranks=1) == []
    assert_equal_in_float32(tmp_path, base, *words)
    checkpoint = tmp_path / "on_card" / "global_step_6"
    export_from_shards(checkpoint, tmp_path / "merged", dtype="float32", lora="merged")
    assert_merged_as_by_peft(base, checkpoint / "huggingface", tmp_path / "merged")


@pytest.mark.parametrize("words", [(), ("model.lora_rank=8",)], ids=["all", "LoRA"])
def test_an_export_is_proven_on_the_card(tmp_path, model, words):
    write_samples(tmp_path / "samples.jsonl")
    validated = (
        f"data.val_files={tmp_path}/samples.jsonl",
        "trainer.test_freq=2",
        "trainer.checkpoint.export_dtype=bfloat16",
    )
    run(tmp_path, "run", model, *ON_CARD, *validated, *words)
    checkpoint = tmp_path / "run" / "global_step_6"
    found, _ = prove_serving(checkpoint, engine="transformers", python="")
    assert found.is_equal, found
    assert abs(found.served_loss - found.val_loss) <= found.tolerance < 0.01 * found.val_loss


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_released_structure_trains_on_a_card_as_on_a_cpu(tmp_path, name):
    """This also holds in bfloat16, where the self-check compares its kernels with those of
    transformers.
    """
    write_replica(tmp_path, CHECKPOINTS[name])
    write_samples(tmp_path / "samples.jsonl")
    on_card = run(tmp_path, "on_card", tmp_path / "model", *ON_CARD, IN_FLOAT32)
    on_cpu = run(tmp_path, "on_cpu", tmp_path / "model", *ON_CPU)
    if name not in BREAKS_TIES:
        assert largest_difference(on_card, on_cpu, "train/loss") < 1e-3
    fast = (*ON_CARD, "trainer.deterministic=false")
    assert len(run(tmp_path, "bfloat16", tmp_path / "model", *fast)) == len(on_cpu)
