"""Every architecture: loaded bit-equal to transformers, same loss and gradients as its plain forward, exported whole.

A tiny random model of each is written by transformers' own `save_pretrained`. Our side loads it sharded over one and
two ranks and runs three documents (packed where the architecture allows, else one by one, with empty micro-batches in
between); the other side is `from_pretrained` with eager attention, one document per forward. The loss that is compared
is the cross-entropy alone: the router loss that some MoE models add is not part of what we train.
"""

import copy
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exports import export_model
from ranks import run_ranks
from toy import VOCAB, ToySamples, model_config
from transformers import AutoConfig, AutoModelForCausalLM, logging

from trainer.checkpoint.export import ExportSource
from trainer.data.loader import pack
from trainer.model import flops, load, packed_lm, state_mixers
from trainer.model.assemble import build_model

SAMPLES = ToySamples()
MAX_LENGTH = int(max(SAMPLES.lengths))
DOCUMENTS = [index for index, length in enumerate(SAMPLES.lengths) if 5 <= length <= 25][:3]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA = {"tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 8}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA = {"chunk_size": 8, "conv_kernel": 3, "expand": 2}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_GRANITE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
_LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, _ORIGINAL: 8, **_FACTORS}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_DEEPSEEK: dict[str, Any] = {
    **_MLA,
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {"head_dim": None},
    "phi3": {"head_dim": None},
    "olmo2": {"head_dim": None},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.25},
    "qwen3_moe": _EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _DEEPSEEK,
    "gpt2": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "granitemoehybrid attention": {**_STATES, **_GRANITE, "head_dim": None, "layer_types": ["attention"] * 2},
    "minicpm3": {**_MLA, "head_dim": None, "num_key_value_heads": 4, "v_head_dim": 6},
    "phi3 longrope unreached": {"head_dim": None, "rope_parameters": {**_LONGROPE, _ORIGINAL: 64}, _ORIGINAL: 64},
    "llama dynamic unreached": {"rope_parameters": _DYNAMIC},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "granite_swa": {"head_dim": None, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {},
    "stablelm": {"head_dim": None},
}
LOOPED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16, "full_attention_interval": 2},
    "mamba": {"head_dim": None, "num_attention_heads": None},
    "bloom": {"tie_word_embeddings": True},
    "mamba2": {**_MAMBA, "head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 2, "num_attention_heads": None},
    "bamba": {**_MAMBA, **_STATES, "head_dim": None, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, **_STATES, "mamba_rms_norm": True, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, **_STATES, **_GRANITE, "head_dim": None, "layer_types": ["mamba", "attention"]},
    "llama4_text": {**_LLAMA4, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8},
    "lfm2": {"head_dim": None, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {
        "head_dim": None,
        "attention_window_size": 4,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "glm_moe_dsa": {**_DEEPSEEK, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
    "gptj": {"head_dim": None, "rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4},
}
"""Packed, with some of their modules looped over the documents."""
PER_DOCUMENT: dict[str, dict[str, Any]] = {
    "phi3 longrope": {"head_dim": None, "rope_parameters": _LONGROPE, _ORIGINAL: 8},
    "llama dynamic": {"max_position_embeddings": 8, "rope_parameters": _DYNAMIC},
    "openai-gpt": {"head_dim": None, "tie_word_embeddings": True},
}
ARCHITECTURES = PACKED | LOOPED | PER_DOCUMENT
FULL_LOGITS = {"gemma2", "granite", "cohere", "minicpm3", "recurrent_gemma"}


def save_model(path: Path, name: str) -> None:
    """A random model, of the type named first, in which no parameter has the value that a missing one would get."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **ARCHITECTURES[name],
    }
    for key in ("head_dim", "num_attention_heads"):
        if settings[key] is None:
            del settings[key]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **settings)
    for key in vars(config):
        if key.endswith(("pdrop", "dropout")):
            setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in {id(t): (n, t) for n, t in model.state_dict().items()}.values():
            if not name.endswith("_decay"):  # MiniMax keeps its causality in them
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)


def expected(path: Path) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """(tensors, mean loss, gradients) of the plain model, as new for each document: dynamic RoPE remembers."""
    new = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss = torch.zeros((), dtype=torch.float64)
    grads: dict[str, torch.Tensor] = {}
    for index in DOCUMENTS:
        model = copy.deepcopy(new)
        ids, mask = (torch.from_numpy(x) for x in SAMPLES.sample(index))
        logits = model(input_ids=ids[None].long(), use_cache=False).logits[0, :-1]
        labels = torch.where(mask[1:], ids[1:].long(), -100)
        total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).double()
        part = total / int(SAMPLES.num_loss_tokens[DOCUMENTS].sum())
        part.backward()
        loss += part.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads.get(name, 0) + parameter.grad
    return {name: tensor.clone() for name, tensor in new.state_dict().items()}, loss.item(), grads


def micro_batches(world: Any, *, is_packed: bool) -> list[Any]:
    """The same number on every rank; none where a rank has nothing left."""
    first, second, third = DOCUMENTS
    if is_packed:
        dealt = [[[first, second, third]]] if world.size == 1 else [[[first, second], []], [[], [third]]]
    else:
        dealt = [[[first], [second], [third]]] if world.size == 1 else [[[first], [second]], [[third], []]]
    return [pack(SAMPLES, members) for members in dealt[world.rank]]


def run_one(world: Any, path: Path, export_dir: Path) -> dict[str, Any]:
    source = packed_lm.ModelSource(str(path), random_weights=False, trust_remote_code=False)
    model: Any = build_model(model_config(), source, world=world, seed=1, max_length=MAX_LENGTH)
    tensors, plain_loss, plain_grads = expected(path)
    ours = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    model.train()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in micro_batches(world, is_packed=model.is_packed):
        part = model(batch).loss_sum / int(SAMPLES.num_loss_tokens[DOCUMENTS].sum())
        part.backward()
        loss += part.detach()
    torch.distributed.all_reduce(loss)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    whole_norm = torch.stack([grad.norm() for grad in plain_grads.values()]).norm()
    export_model(world, model, export_dir, ExportSource(path, None, ()), dtype="float32")
    return {
        "is_packed": model.is_packed,
        "looped": state_mixers.looped_kinds(model),
        "forward": model.forward.__name__,
        "quadratic cost": flops.quadratic_cost(model),
        "differing tensors": [name for name, t in tensors.items() if not torch.equal(t, ours[name])],
        "loss error": abs(loss.item() - plain_loss) / plain_loss,
        "gradients missing": sorted(set(plain_grads) - set(grads)),
        "gradient error": max(
            float((grad - plain_grads.get(name, torch.zeros_like(grad))).norm() / whole_norm)
            for name, grad in grads.items()
        ),
    }


def run_all(world: Any, root: Path) -> dict[str, Any]:
    """{architecture: results, or the traceback}."""
    logging.disable_progress_bar()
    results: dict[str, Any] = {}
    for name in ARCHITECTURES:
        try:
            results[name] = run_one(world, root / name, root / f"{name}-export-{world.size}")
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        save_model(path / name, name)
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(request: pytest.FixtureRequest, root: Path) -> tuple[int, dict[str, Any]]:
    return request.param, run_ranks(run_all, request.param, root, timeout_s=300)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_equal_plain_transformers(results: tuple[int, dict[str, Any]], name: str) -> None:
    result = results[1][name]
    assert isinstance(result, dict), result
    assert result["is_packed"] == (name not in PER_DOCUMENT)
    assert bool(result["looped"]) == (name in LOOPED), result["looped"]
    assert result["forward"] == ("_forward_full_logits" if name in FULL_LOGITS else "_forward_fused")
    assert (result["quadratic cost"] > 0) == (name not in ("mamba", "mamba2"))
    assert result["differing tensors"] == []
    assert result["loss error"] < 1e-6
    assert result["gradients missing"] == []
    assert result["gradient error"] < 1e-5


@pytest.mark.covers("S3.23")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_export_is_what_transformers_would_save(results: tuple[int, dict[str, Any]], root: Path, name: str) -> None:
    world_size, by_name = results
    assert isinstance(by_name[name], dict), by_name[name]
    export = root / f"{name}-export-{world_size}"
    loaded: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    theirs = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).state_dict()
    assert theirs.keys() == model.state_dict().keys()
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, theirs[key])] == []
    assert set(load._stored_files(export)) == set(load._stored_files(root / name))
    assert json.loads((export / "config.json").read_text())["torch_dtype"] == "float32"
