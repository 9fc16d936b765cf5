"""Rotary positions that depend on the text length: any batch equals its documents one by one in a
fresh model.
"""

import copy

import pytest
import torch
from ranks import run_ranks
from toy import ToySamples, build, model_config, plain_loss, write_model_config
from transformers import AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model.assemble import design_model

LIMIT = 16
SAMPLES = ToySamples()
ALL = [index for index, length in enumerate(SAMPLES.lengths) if length > 1]
SHORT = [index for index in ALL if SAMPLES.lengths[index] <= LIMIT]
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LAYER_TYPES = ["sliding_attention", "full_attention"]


def write(path, kind):
    """A llama whose limit is 16 tokens; the longest sample has 40."""
    positions = LIMIT if kind["rope_type"] == "dynamic" else 4 * LIMIT
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **kind}
    return write_model_config(
        path, "llama", rope_parameters=parameters, max_position_embeddings=positions
    )


def write_by_layer_type(path):
    """A gemma 3 with longrope only in its full attention layers."""
    kinds = {
        "full_attention": {
            "rope_theta": 1e4,
            "original_max_position_embeddings": LIMIT,
            **LONGROPE,
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    window = {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": LAYER_TYPES}
    return write_model_config(path, "gemma3_text", rope_parameters=kinds, **window)


def differences(world, source, indices, max_length):
    """Return (packed, largest relative difference of a micro-batch's loss from a fresh plain model
    for each document).
    """
    model = build(world, source, max_length=max_length)
    weights = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(source.config, attn_implementation="eager")
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()
    size = 3 if model.is_packed else 1
    worst = 0.0
    for first in range(0, len(indices), size):
        members = indices[first : first + size]
        with torch.no_grad():
            expected = sum(plain_loss(copy.deepcopy(plain), SAMPLES, [index]) for index in members)
            found = model(pack(SAMPLES, members)).loss_sum
        worst = max(worst, float((found - expected).abs() / expected))
    return model.is_packed, worst


@pytest.mark.parametrize(
    ("kind", "indices", "max_length", "is_packed"),
    [
        (LONGROPE, ALL, 40, False),
        (LONGROPE, SHORT, LIMIT, True),
        (DYNAMIC, ALL, 40, False),
        (DYNAMIC, SHORT, LIMIT, True),
        (YARN, ALL, 40, True),
        ("by layer type", ALL, 40, False),
        ("by layer type", SHORT, LIMIT, True),
    ],
)
def test_any_batch_equals_its_documents_one_by_one_in_a_new_model(
    tmp_path, kind, indices, max_length, is_packed
):
    source = write_by_layer_type(tmp_path) if kind == "by layer type" else write(tmp_path, kind)
    found = run_ranks(differences, 1, source, indices, max_length)[0]
    assert found[0] == is_packed
    assert found[1] < 1e-6


@pytest.mark.parametrize("kind", [LONGROPE, DYNAMIC])
def test_packing_above_the_limit_is_refused_and_auto_says_why(tmp_path, kind):
    source = write(tmp_path, kind)
    for max_length, is_packed in ((17, False), (16, True)):
        reason = design_model(model_config(), source, max_length=max_length).reason
        assert is_packed == (reason is None) != ("data.max_length=16 or less" in str(reason))
    with pytest.raises(
        ConfigError,
        match=r"model.attention=packed.*above 16 tokens, its rotary positions depend on the longest document",
    ):
        design_model(model_config(attention="packed"), source, max_length=17)
