"""Floating-point operations of mixtures of experts, against torch's count over transformers'
own model.
"""

from typing import Any

import pytest
import torch
from families import family_settings
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.batch import StepBatch
from trainer.model import flops

TOKENS = 32
FULL = {"layer_types": ["full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "gpt_oss": FULL,
    "deepseek_v3": {"n_shared_experts": 1},
    "gemma4_text": {
        **FULL,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
}


def small_model(name):
    settings = family_settings(name, **{"hidden_size": 64, **FAMILIES[name]})
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **settings),
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_costs_its_own_experts_and_the_shared_ones(name):
    """Within 1 %: the rotary frequencies are a matrix product, too."""
    model = small_model(name)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None]).logits.sum().backward()
    cost = flops.step_flops(model)
    assert cost is not None
    step = StepBatch(1, 0, (), TOKENS, TOKENS, num_samples=1, lengths=(TOKENS,))
    assert cost.of(step) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_experts_chosen_by_an_unknown_number_are_not_guessed(monkeypatch):
    model = small_model("gpt_oss")
    monkeypatch.setattr(flops, "num_chosen", lambda config: None)
    assert flops.step_flops(model) is None
    assert flops.length_costs(model)[0] > 0


def test_linear_attention_costs_no_pairs_of_tokens():
    """One of two layers; four heads with keys and values of 8."""
    config = AutoConfig.for_model("minimax", **family_settings("minimax"))
    cost = flops.step_flops(AutoModelForCausalLM.from_config(config))
    assert cost is not None and cost.per_squared_length == 6 * 4 * (8 + 8)
