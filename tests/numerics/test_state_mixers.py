"""Modules that carry state from token to token: packed micro-batches equal their documents,
whatever else is on.
"""

import inspect
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_settings
from family_trials import heard
from ranks import each, run_ranks
from test_parallelize import gathers_of_a_step, worst
from toy import ToySamples, build, build_toy_model, write_model_config

from trainer.data.batch import PackedBatch
from trainer.data.loader import pack
from trainer.model.state_mixers import kernel_kinds
from trainer.tools.plan.memory import plan_memory
from trainer.train.start.compose import load_config

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
    return passed(model, [pack(SAMPLES, members) for members in batches])


def passed(model: Any, batches: list[PackedBatch]) -> tuple[float, list[Any]]:
    model.train()
    losses = [model(batch).loss_sum for batch in batches]
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


def chunk_gated_delta_rule(
    query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """The kernel of flash-linear-attention by transformers' reference, document by document."""
    rows = [query, key, value, g, beta]
    bounds = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = [
        _reference("torch_chunk_gated_delta_rule")(
            *(row[:, start:end] for row in rows), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
        )[0]
        for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(outputs, dim=1), None


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """The kernel of causal-conv1d; its documents are those of `seq_idx`, int32 [1, T]."""
    lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
    assert seq_idx is None or seq_idx.dtype == torch.int32
    parts = [
        _reference("causal_conv1d_fn")(part, weight, bias, activation)
        for part in x.split(lengths, dim=2)
    ]
    return torch.cat(parts, dim=2)


def refusing(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    if cu_seqlens is not None:
        raise NotImplementedError("no document bounds on this card")
    return chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel)


def _reference(name: str) -> Any:
    modeling = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"]
    return inspect.unwrap(getattr(modeling, name))


def step_with_kernels(
    world: Any, source: Any, settings: dict[str, Any], kernels: list[Any]
) -> tuple[Any, list[str], list[str]]:
    """((loss, gradients) of one packed batch, classes that use kernels, log) with these functions in
    place of the packages' (convolution, delta rule). This process must not have built the model.
    """
    install(kernels)
    with heard() as lines:
        model = build(world, source, **settings)
    batch = pack(SAMPLES, DOCUMENTS).share(world.sequence_rank, world.sequence_size)
    return passed(model, [batch]), kernel_kinds(model), lines


def install(kernels: list[Any]) -> None:
    """Put packages with these functions (convolution, delta rule) into this process."""
    names = ["causal_conv1d", "fla", "fla.ops", "fla.ops.gated_delta_rule"] if kernels else []
    modules: Any = {name: types.ModuleType(name) for name in names}
    if kernels:
        convolve, mix = kernels
        vars(modules["causal_conv1d"]).update(
            causal_conv1d_fn=convolve, causal_conv1d_update=convolve
        )
        vars(modules["fla.ops.gated_delta_rule"]).update(
            chunk_gated_delta_rule=mix, fused_recurrent_gated_delta_rule=mix
        )
    sys.modules.update(modules)


@pytest.mark.parametrize("recomputes", [False, True])
def test_kernels_with_document_bounds_equal_the_loop(hybrid, recomputes):
    settings = {"enable_gradient_checkpointing": recomputes}
    kernels = [causal_conv1d_fn, chunk_gated_delta_rule]
    looped, no_kinds, _ = run_ranks(step_with_kernels, 2, hybrid, settings, [])[0]
    packed, kinds, lines = run_ranks(step_with_kernels, 2, hybrid, settings, kernels)[0]
    assert (no_kinds, kinds) == ([], ["Qwen3_5GatedDeltaNet"])
    assert any("kernels that take document bounds: Qwen3_5GatedDeltaNet" in line for line in lines)
    assert abs(packed[0] - looped[0]) / looped[0] < 1e-6
    assert worst(packed, looped) < 1e-5


def leaking_conv(x, weight, bias=None, seq_idx=None, activation=None):
    return _reference("causal_conv1d_fn")(x, weight, bias, activation)


@pytest.mark.parametrize(
    "kernels",
    [[leaking_conv, chunk_gated_delta_rule], [causal_conv1d_fn, refusing]],
    ids=["leaks", "refuses"],
)
def test_kernels_that_fail_the_self_check_are_not_used(hybrid, kernels):
    looped, _, _ = run_ranks(step_with_kernels, 1, hybrid, {}, [])[0]
    found, kinds, lines = run_ranks(step_with_kernels, 1, hybrid, {}, kernels)[0]
    assert any("kernels of Qwen3_5GatedDeltaNet fail the self-check" in line for line in lines)
    assert kinds == []
    assert found[0] == looped[0] and worst(found, looped) == 0


def on_real_tensors_only(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a kernel cannot run on fake tensors")


def planned_gib(_: Any, words: list[str], kernels: list[Any]) -> float:
    install(kernels)
    torch.distributed.destroy_process_group()
    return plan_memory(load_config(words), 8).needed_gib


def test_a_plan_needs_no_kernel(hybrid):
    """Installed kernels do not run on the plan's fake tensors; it counts the references."""
    words = [f"model.partial_pretrain={hybrid.path}", "data.max_length=64"]
    kernels = [on_real_tensors_only] * 2
    bare, installed = (
        run_ranks(planned_gib, 1, words, functions)[0] for functions in ([], kernels)
    )
    assert installed == bare


def test_ranks_that_share_documents_do_not_use_kernels(hybrid):
    settings = {"ulysses_sequence_parallel_size": 2}
    kernels = [causal_conv1d_fn, chunk_gated_delta_rule]
    found = run_ranks(step_with_kernels, 2, hybrid, settings, kernels, sequence_size=2)
    assert all(kinds == [] for _, kinds, _ in found)
