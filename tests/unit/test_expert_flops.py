"""Floating-point operations of a step, against torch's count over transformers' own model."""

import pytest
import torch
from families import FAMILIES as ALL_FAMILIES
from families import family_settings
from family_trials import family_config
from sweeps import some
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.batch import StepBatch
from trainer.model import flops

TOKENS = 32
REFUSED = {"dory"}
"""Families whose training is refused."""
FULL = {"layer_types": ["full_attention"] * 2}
FAMILIES = {
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


def share_of_count(model, num_tokens=TOKENS):
    """Return the cost of a step as a share of torch's count; None if the cost is unknown."""
    cost = flops.step_flops(model)
    if cost is None:
        return None
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(num_tokens)[None], use_cache=False).logits.sum().backward()
    step = StepBatch(1, 0, (), num_tokens, num_tokens, num_samples=1, lengths=(num_tokens,))
    return cost.of(step) / counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_costs_its_own_experts_and_the_shared_ones(name):
    """Within 1 %: the rotary frequencies are a matrix product, too."""
    assert share_of_count(small_model(name)) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    "name",
    sorted({*some(sorted(ALL_FAMILIES.keys() - REFUSED), 12), "dbrx", "hrm_text", "diffllama"}),
)
def test_the_cost_of_a_family_is_right_or_unknown(name):
    """Windows of 4 tokens, of which torch's count knows nothing, make up to 6 % of these models."""
    model = AutoModelForCausalLM.from_config(
        family_config(name), attn_implementation="eager", experts_implementation="eager"
    )
    share = share_of_count(model, num_tokens=16)
    assert share is None or share == pytest.approx(1, abs=0.06)


def test_experts_chosen_by_an_unknown_number_are_not_guessed(monkeypatch):
    model = small_model("gpt_oss")
    monkeypatch.setattr(flops, "num_chosen", lambda config: None)
    assert flops.step_flops(model) is None
    assert flops.length_costs(model)[0] > 0


def test_linear_attention_costs_no_pairs_of_tokens():
    """One of two layers; four heads with keys and values of 8."""
    config = AutoConfig.for_model("minimax", **family_settings("minimax"))
    cost = flops.step_flops(AutoModelForCausalLM.from_config(config))
    assert cost.per_squared_length == 6 * 4 * (8 + 8)
