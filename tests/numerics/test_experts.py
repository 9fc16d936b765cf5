"""Mixtures of experts: router statistics and the router's auxiliary loss depend only on the global
batch.

The loss is compared with a plain loop over transformers' own model, one document at a time, in
float64, to the tolerances of `test_invariance.py`.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from families import family_settings
from plain_training import AS_DEFINED
from ranks import run_ranks
from sweeps import short_or_full
from test_invariance import plain_run
from toy import EXPERTS, short_run, write_model_config

from trainer.model import packed_lm
from trainer.model.experts import Routers

STEPS = 4
COEFFICIENT = 0.5
KEYS = ("train/loss", "train/grad_norm", "moe/router_loss", "moe/load_max_over_mean")


@pytest.fixture(scope="module")
def source(root):
    return write_model_config(
        root, "qwen3_moe", router_aux_loss_coef=COEFFICIENT, tie_word_embeddings=False, **EXPERTS
    )


def train(world, source, **settings):
    """Columns of a short run's rows."""
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        run = short_run(world, source, total_steps=STEPS, optim=AS_DEFINED, **settings)
    rows = run.tracking
    return {key: rows.column(key) for key in (*KEYS, "val/loss")}


@pytest.fixture(scope="module")
def expected(source):
    return plain_run(source, num_steps=STEPS)


def differing(ours, theirs):
    tolerances = dict(zip(KEYS, (1e-6, 1e-5, 1e-6, 0.0), strict=True))
    return [
        key
        for key in KEYS
        if ours[key] != pytest.approx(theirs[key], rel=tolerances[key], abs=1e-12)
    ]


EXECUTIONS = {
    "1 rank": (1, {}),
    "per document, recomputed": (1, {"is_packed": False, "enable_gradient_checkpointing": True}),
    "2 ranks": (2, {"max_samples": 1, "enable_gradient_checkpointing": "selective"}),
    "4 ranks, HSDP": (4, {"max_tokens": 48, "fsdp_size": 2}),
    "a rank without samples": (5, {"max_samples": 1}),
    "experts on 2 ranks": (2, {"expert_size": 2, "max_samples": 1}),
    "experts on 2 of 4 ranks, selective": (
        4,
        {"expert_size": 2, "max_tokens": 48, "enable_gradient_checkpointing": "selective"},
    ),
    "experts on 2 ranks, HSDP": (4, {"expert_size": 2, "max_tokens": 48, "fsdp_size": 2}),
    "experts and positions on 2 ranks": (
        2,
        {"expert_size": 2, "sequence_size": 2, "max_tokens": 48},
    ),
    **short_or_full({}, full={"compiled": (2, {"max_samples": 2, "compile": True})}),
}


@pytest.mark.parametrize("name", EXECUTIONS)
def test_the_router_loss_and_the_loads_are_those_of_the_plain_loop(source, expected, name):
    world_size, settings = EXECUTIONS[name]
    found = run_ranks(train, world_size, source, **settings)[0]
    assert differing(found, expected) == [], (found, expected)
    assert found["moe/router_loss"][0] == 0.0 and min(found["moe/router_loss"][1:]) > 1


FAMILIES = {
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_the_router_loss_of_the_plain_loop(tmp_path, name):
    settings = family_settings(name, router_aux_loss_coef=COEFFICIENT, **FAMILIES[name])
    source = write_model_config(tmp_path, name, **settings)
    (found,) = run_ranks(train, 1, source)
    assert differing(found, plain_run(source, num_steps=STEPS)) == []


UNWATCHED = {"router_aux_loss_coef": 0.1}


@pytest.mark.parametrize(
    ("model_type", "changes", "frozen", "said"),
    [
        ("qwen3_moe", EXPERTS, "none", "(coefficient 0.001 in config.json) is part of"),
        ("qwen3_moe", EXPERTS, "mlp.gate", "excluded from the loss"),
        ("deepseek_v4", UNWATCHED, "none", "excluded from the loss"),
        ("hy_v3", {**EXPERTS, **UNWATCHED}, "none", "excluded from the loss"),
        ("qwen3_moe", {**EXPERTS, "router_aux_loss_coef": 0.0}, "none", ""),
    ],
)
def test_a_router_loss_is_trained_or_the_log_names_why_not(
    tmp_path, caplog, model_type, changes, frozen, said
):
    source = write_model_config(tmp_path, model_type, **changes)
    model = packed_lm.build_on_meta(source, is_packed=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = frozen not in name
    with caplog.at_level("INFO"):
        routers = Routers(model, torch.device("cpu"))
    assert [said in message for message in caplog.messages] == [True] * bool(said)
    assert ("moe/router_loss" in routers.take()[0]) == ("part of" in said)
