"""Floating-point operations of mixtures of experts, against torch's count over transformers'
own model.
"""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.batch import StepBatch
from trainer.model import flops

TOKENS = 32
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "head_dim": 24},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "mixtral": _LOCAL,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL,
    "gpt_oss": {**_LOCAL, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "layer_types": ["full_attention"] * 2,
    },
}


def small_model(name: str) -> Any:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    settings = {
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(name, **{**sizes, **settings, **FAMILIES[name]})
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="batched_mm"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_costs_its_own_experts_and_the_shared_ones(name: str) -> None:
    """Within 1 %: the rotary frequencies are a matrix product, too."""
    model = small_model(name)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None]).logits.sum().backward()
    cost = flops.step_flops(model)
    assert cost is not None
    counts = {
        "num_loss_tokens": TOKENS,
        "num_tokens": TOKENS,
        "num_samples": 1,
        "lengths": (TOKENS,),
    }
    step = StepBatch(step=1, epoch=0, micro_batches=(), **counts)
    assert cost.of(step) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_experts_chosen_by_an_unknown_number_are_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model("qwen3_moe")
    monkeypatch.setattr(flops, "num_chosen", lambda config: None)
    assert flops.step_flops(model) is None
    assert flops.length_costs(model)[0] > 0
