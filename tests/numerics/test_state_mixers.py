"""Modules that carry state from token to token: packed micro-batches equal their documents,
whatever else is on.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from families import family_settings
from ranks import each, run_ranks
from test_parallelize import gathers_of_a_step, worst
from toy import ToySamples, build, build_toy_model, model_config, write_model_config

from trainer.data.loader import pack
from trainer.model import packed_lm, state_mixers
from trainer.model.assemble import build_model, design_model, how_documents_run

SAMPLES = ToySamples()
DOCUMENTS = [index for index, length in enumerate(SAMPLES.lengths) if length > 1][:6]
HYBRID = ("qwen3_5_text", family_settings("qwen3_5_text"))
MASKED = ("gptj", {"rotary_dim": 4, "n_embd": 64, "n_layer": 2, "n_head": 4})


@pytest.fixture
def hybrid(tmp_path: Path) -> Any:
    return write_model_config(tmp_path, HYBRID[0], **HYBRID[1])


def step(
    world: Any, source: Any, batches: list[list[int]], settings: dict[str, Any]
) -> tuple[float, list[Any]]:
    """(loss, gradients); all forward passes come before all backward passes."""
    model = build_toy_model(world, source, **settings)
    model.train()
    losses = [model(pack(SAMPLES, members)).loss_sum for members in batches]
    for loss in losses:
        loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    return sum(loss.item() for loss in losses), grads


@pytest.mark.parametrize("kind", [HYBRID, MASKED], ids=lambda kind: kind[0])
def test_documents_are_those_of_the_forward_pass_when_layers_are_computed_again(tmp_path, kind):
    """Two micro-batches of different documents with an empty one between them."""
    source = write_model_config(tmp_path, kind[0], **{"tie_word_embeddings": False, **kind[1]})
    batches = [DOCUMENTS[:2], [], DOCUMENTS[2:]]
    hows = (False, True, "selective")
    variants = {
        how: {"batches": batches, "settings": {"enable_gradient_checkpointing": how}}
        for how in hows
    }
    variants["alone"] = {
        "batches": [[index] for index in DOCUMENTS],
        "settings": {"is_packed": False},
    }
    found = run_ranks(each, 1, step, source, variants)[0]
    one_by_one = found.pop("alone")
    for how, packed in found.items():
        assert abs(packed[0] - one_by_one[0]) / one_by_one[0] < 1e-6, how
        assert worst(packed, one_by_one) < 1e-5, how


def test_shards_are_gathered_once_per_micro_batch_not_per_document(hybrid):
    variants = {len(members): {"members": members} for members in (DOCUMENTS, DOCUMENTS[:1])}
    for of_rank in run_ranks(each, 2, gathers_of_a_step, hybrid, variants):
        assert len(set(of_rank.values())) == 1 and all(next(iter(of_rank.values())))


def built(world: Any, source: Any, is_missed: bool) -> tuple[bool, str]:
    """(whether packed, the line that says so) of a model whose mixers are looped, or are not
    known as such.
    """
    loop = (lambda model: True) if is_missed else state_mixers.loop_over_documents
    with patch.object(state_mixers, "loop_over_documents", loop):
        design = design_model(model_config(), source, max_length=64)
        model: Any = build_model(design, world=world, seed=1)
    return model.is_packed, how_documents_run(design)


def test_a_mixer_that_leaks_is_found_and_documents_run_one_by_one(hybrid):
    for found in run_ranks(
        each, 2, built, hybrid, {name: {"is_missed": name} for name in (False, True)}
    ):
        assert found[False] == (
            True,
            "documents run packed; looped over documents: Qwen3_5GatedDeltaNet",
        )
        assert found[True] == (
            False,
            "documents run one by one (slower): packed ones fail the self-check",
        )


def bf16_error(world: Any, source: Any) -> bool:
    return build(world, source, param_dtype="bfloat16").is_packed  # raises where it fails


@pytest.mark.parametrize("kind", [HYBRID, MASKED], ids=lambda kind: kind[0])
def test_bfloat16_passes_the_self_check(tmp_path, kind):
    source = write_model_config(tmp_path, kind[0], **{"tie_word_embeddings": False, **kind[1]})
    assert run_ranks(bf16_error, 1, source) == [True]


def test_a_looped_module_never_runs_without_knowing_its_documents(hybrid):
    model: Any = packed_lm.build_on_meta(hybrid, is_packed=True)
    with pytest.raises(
        RuntimeError, match=r"Qwen3_5GatedDeltaNet runs outside of attention\.documents"
    ):
        model.model.layers[0].linear_attn(torch.empty(1, 4, 64, device="meta"))
