"""Mixtures of experts: router statistics and the router's auxiliary loss follow the global batch
alone.

The loss is compared with a plain loop over transformers' own model, one document at a time, in
float64, to the tolerances of `test_invariance.py`.
"""

import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from families import SIZES, family_settings
from plain_training import AS_DEFINED
from ranks import run_ranks
from sweeps import short_or_full
from test_invariance import plain_run
from toy import EXPERTS, ToySamples, build_toy_model, short_run, toy_run, write_model_config
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.model import packed_lm
from trainer.model.experts import Routers
from trainer.runtime import seeding

STEPS = 4
COEFFICIENT = 0.5
KEYS = ("train/loss", "train/grad_norm", "moe/router_loss", "moe/load_max_over_mean")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    return write_model_config(
        path, "qwen3_moe", router_aux_loss_coef=COEFFICIENT, tie_word_embeddings=False, **EXPERTS
    )


def train(world: Any, source: Any, **settings: Any) -> dict[str, list[float]]:
    """Columns of a short run's rows."""
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        run = short_run(world, source, total_steps=STEPS, optim=AS_DEFINED, **settings)
    rows: Any = run.tracking
    return {key: rows.column(key) for key in (*KEYS, "val/loss")}


def plain_model(source: Any) -> Any:
    """Stock transformers with the weights of the toy model; the loop over experts as its
    authors wrote it.
    """
    torch.manual_seed(seeding.key("init", 7))
    config = AutoConfig.from_pretrained(source.path)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).double()
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def expected(source: Any) -> dict[str, list[float]]:
    return plain_run(source, num_steps=STEPS)


def differing(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> list[str]:
    tolerances = dict(zip(KEYS, (1e-6, 1e-5, 1e-6, 0.0), strict=True))
    return [
        key
        for key in KEYS
        if ours[key] != pytest.approx(theirs[key], rel=tolerances[key], abs=1e-12)
    ]


EXECUTIONS: dict[str, tuple[int, dict[str, Any]]] = {
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


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
}


def router_losses(world: Any, source: Any) -> tuple[float, float, float]:
    """(Our loss, transformers', largest relative difference of a gradient) of the same batch
    twice in a row.
    """
    model = build_toy_model(world, source, is_packed=False)
    plain = plain_model(source)
    model.train()
    parts = toy_run(world, model, ToySamples(), total_steps=1)
    routers: Any = parts.parts["routers"]
    batch = next(iter(parts.batches))
    for _ in range(2):
        model.zero_grad()
        for micro_batch in batch.micro_batches:
            loss_sum = model(micro_batch).loss_sum
            (0.0 * loss_sum + routers.add(micro_batch, batch.num_tokens)).backward()
        sums, tokens = routers.take()
        routers.settle(tokens, batch)
    outputs = [
        plain(input_ids=one.input_ids_T[None], output_router_logits=True)
        for one in batch.micro_batches
    ]
    logits = tuple(
        torch.cat(layer)
        for layer in zip(*(output.router_logits for output in outputs), strict=True)
    )
    formula = sys.modules[type(plain).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
    expected = formula(logits, SIZES["num_experts"], SIZES["num_experts_per_tok"])
    (COEFFICIENT * expected).backward()
    errors = [
        float((ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
        if theirs.grad is not None and theirs.grad.norm() > 1e-9
    ]
    return sums["moe/router_loss"].item(), expected.item(), max(errors)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_and_its_gradient_are_transformers_own(tmp_path, name):
    """Where the fractions of the step before are those of this step's batch."""
    settings = family_settings(name, router_aux_loss_coef=COEFFICIENT, **FAMILIES[name])
    source = write_model_config(tmp_path, name, **settings)
    ours, theirs, error = run_ranks(router_losses, 1, source)[0]
    assert ours == pytest.approx(theirs, rel=1e-6) and ours > 1
    assert error < 1e-4


UNWATCHED = {"router_aux_loss_coef": 0.1}


@pytest.mark.parametrize(
    ("model_type", "changes", "frozen", "said"),
    [
        ("qwen3_moe", EXPERTS, "none", "(coefficient 0.001 in config.json) is part of"),
        ("qwen3_moe", EXPERTS, "mlp.gate", "left out of the loss"),
        ("deepseek_v4", UNWATCHED, "none", "left out of the loss"),
        ("hy_v3", {**EXPERTS, **UNWATCHED}, "none", "left out of the loss"),
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
