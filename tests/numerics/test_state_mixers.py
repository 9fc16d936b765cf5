"""Modules that carry state from token to token: packed micro-batches equal their documents, with
any other setting.
"""

import inspect
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from families import family_settings
from family_trials import heard
from ranks import each, run_ranks
from test_parallelize import gathers_of_a_step, worst
from toy import ToySamples, build, build_toy_model, write_model_config
from transformers.activations import ACT2FN

from trainer.data.loader import pack
from trainer.model import packed_lm
from trainer.model.state_mixers import kernel_kinds, package_kinds
from trainer.tools.plan.memory import plan_memory
from trainer.train.start.compose import load_config

SAMPLES = ToySamples()
DOCUMENTS = [index for index, length in enumerate(SAMPLES.lengths) if length > 1][:6]
HYBRID = ("qwen3_5_text", family_settings("qwen3_5_text"))
MASKED = ("gptj", {"rotary_dim": 4, "n_embd": 64, "n_layer": 2, "n_head": 4})


@pytest.fixture
def hybrid(tmp_path):
    return write_model_config(tmp_path, HYBRID[0], **HYBRID[1])


def step(world, source, batches, settings):
    """Return (loss, gradients). All forward passes come before all backward passes."""
    model = build_toy_model(world, source, **settings)
    return passed(model, [pack(SAMPLES, members) for members in batches])


def passed(model, batches):
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
    """The kernel of flash-linear-attention, computed with transformers' reference document by
    document.
    """
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
    """The kernel of causal-conv1d. Its documents are given by `seq_idx`, int32 [1, T]."""
    lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
    assert seq_idx is None or seq_idx.dtype == torch.int32
    parts = [_causal_conv1d(part, weight, bias, activation) for part in x.split(lengths, dim=2)]
    return torch.cat(parts, dim=2)


def _causal_conv1d(x, weight, bias, activation):
    num_channels, kernel_size = weight.shape
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=kernel_size - 1, groups=num_channels)
    return ACT2FN[activation](out[..., : x.shape[2]]) if activation else out[..., : x.shape[2]]


def refusing(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    if cu_seqlens is not None:
        raise NotImplementedError("no document bounds on this card")
    return chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel)


def _reference(name, family="qwen3_5"):
    modeling = sys.modules[f"transformers.models.{family}.modeling_{family}"]
    return inspect.unwrap(getattr(modeling, name))


def step_with_kernels(world, source, settings, kernels):
    """Return ((loss, gradients) of one packed batch, classes that use kernels, log) with these
    functions (convolution, delta rule) instead of the packages'.

    This process must not have built the model before.
    """
    install(kernels)
    with heard() as lines:
        model = build(world, source, **settings)
    batch = pack(SAMPLES, DOCUMENTS).share(world.sequence_rank, world.sequence_size)
    return passed(model, [batch]), kernel_kinds(model), lines


def install(kernels):
    """Add packages with these functions (convolution, delta rule, Mamba's two) to this process."""
    if not kernels:
        return
    convolve, mix, *mamba = kernels
    scan, fused = mamba or (mix, mix)
    functions = {
        "causal_conv1d": {"causal_conv1d_fn": convolve, "causal_conv1d_update": convolve},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": mix,
            "fused_recurrent_gated_delta_rule": mix,
        },
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": scan,
            "mamba_split_conv1d_scan_combined": fused,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": scan},
    }
    for path, of_module in functions.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            sys.modules.setdefault(name, types.ModuleType(name))
        vars(sys.modules[path]).update(of_module)


@pytest.mark.parametrize("recomputes", [False, True])
def test_kernels_with_document_bounds_equal_the_loop(hybrid, recomputes):
    settings = {"enable_gradient_checkpointing": recomputes}
    looped, no_kinds, _ = run_ranks(step_with_kernels, 2, hybrid, settings, [])[0]
    packed, kinds, lines = run_ranks(step_with_kernels, 2, hybrid, settings, KERNELS)[0]
    assert (no_kinds, kinds) == ([], ["Qwen3_5GatedDeltaNet"])
    assert any("kernels that take document bounds: Qwen3_5GatedDeltaNet" in line for line in lines)
    assert abs(packed[0] - looped[0]) / looped[0] < 1e-6
    assert worst(packed, looped) < 1e-5


def failing(*_, **__):
    """Fail as a kernel does on another dtype, on tensors of the CPU, or on fake tensors."""
    raise RuntimeError("the kernel cannot take these tensors")


def leaking_conv(x, weight, bias=None, seq_idx=None, activation=None):
    return _causal_conv1d(x, weight, bias, activation)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, seq_idx=None, **kwargs):
    """The kernel of mamba-ssm, computed with transformers' reference document by document."""
    reference = _reference("mamba2_chunk_scan", "bamba")
    rows = [x, dt, B, C]
    lengths = [x.shape[1]] if seq_idx is None else seq_idx[0].bincount().tolist()
    parts = [
        reference(x_part, dt_part, A, B_part, C_part, chunk_size, **kwargs)
        for x_part, dt_part, B_part, C_part in zip(
            *(row.split(lengths, dim=1) for row in rows), strict=True
        )
    ]
    outputs = [part[0] if isinstance(part, tuple) else part for part in parts]
    return torch.cat(outputs, dim=1)


def other_values(projected, *_, outproj_weight, **__):
    return projected[..., : outproj_weight.shape[1]] @ outproj_weight.T


KERNELS = [causal_conv1d_fn, chunk_gated_delta_rule]
BAMBA = ("bamba", family_settings("bamba"))
FAILS = "kernels of Qwen3_5GatedDeltaNet fail the self-check"
REPLACED = "transformers' slower code replaces them"
UNUSED = {
    "leaks": (HYBRID, [leaking_conv, chunk_gated_delta_rule], FAILS),
    "refuses bounds": (HYBRID, [causal_conv1d_fn, refusing], FAILS),
    "refuses the CPU": (HYBRID, [failing, failing], FAILS),
    "fails in training": (BAMBA, [*KERNELS, mamba_chunk_scan_combined, failing], REPLACED),
    "differs in training": (BAMBA, [*KERNELS, mamba_chunk_scan_combined, other_values], REPLACED),
}
"""Kernels that fail the self-check are not used. Mamba has a kernel for training alone."""


@pytest.mark.parametrize("name", UNUSED)
def test_the_self_check_runs_the_kernel_that_training_runs(tmp_path, name):
    (family, settings), kernels, said = UNUSED[name]
    source = write_model_config(tmp_path, family, **settings)
    looped, _, _ = run_ranks(step_with_kernels, 1, source, {}, [])[0]
    found, kinds, lines = run_ranks(step_with_kernels, 1, source, {}, kernels)[0]
    assert any(said in line for line in lines), lines
    assert kinds == []
    assert found[0] == looped[0] and worst(found, looped) == 0


def test_a_family_without_functions_of_packages_has_none(tmp_path):
    """RWKV calls functions of transformers that are wrapped because of their cache."""
    source = write_model_config(tmp_path, "rwkv", **family_settings("rwkv"))
    model = packed_lm.build_on_meta(source, is_packed=True, uses_kernels=True)
    assert (package_kinds(model), kernel_kinds(model)) == ([], [])


def planned_gib(_, words, kernels):
    install(kernels)
    torch.distributed.destroy_process_group()
    return plan_memory(load_config(words), 8).needed_gib


def test_a_plan_needs_no_kernel(hybrid):
    """Installed kernels do not run on the plan's fake tensors. The plan counts the references."""
    words = [f"model.partial_pretrain={hybrid.path}", "data.max_length=64"]
    bare, installed = (
        run_ranks(planned_gib, 1, words, kernels)[0] for kernels in ([], [failing] * 2)
    )
    assert installed == bare


def test_ranks_that_share_documents_do_not_use_kernels(hybrid):
    settings = {"ulysses_sequence_parallel_size": 2}
    found = run_ranks(step_with_kernels, 2, hybrid, settings, KERNELS, sequence_size=2)
    assert all(kinds == [] for _, kinds, _ in found)
