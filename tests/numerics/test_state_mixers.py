"""Modules that carry state from token to token: packed micro-batches equal their documents,
whatever else is on.
"""

from pathlib import Path
from typing import Any

import pytest
from families import family_settings
from ranks import each, run_ranks
from test_parallelize import gathers_of_a_step, worst
from toy import ToySamples, build_toy_model, write_model_config

from trainer.data.loader import pack

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
