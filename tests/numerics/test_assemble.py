"""From a config.json to a model that trains, or to a helpful error: which models are refused, and
what `auto` falls back to.
"""

import os
import pickle
import re
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
import torch._dynamo.exc
import torch._inductor.exc
import torch.distributed as dist
from family_trials import heard
from ranks import run_ranks, started_ranks
from test_selfcheck import _leaking
from toy import ToySamples, build, write_model_config
from toy_runs import source as source  # a fixture
from transformers import AutoConfig
from whole_models import WRAPPERS

from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model import attention, packed_lm
from trainer.runtime import seeding
from trainer.train.start import inputs
from trainer.train.start.compose import load_config


def outcome(world, source, attend, *, choice="auto"):
    """How documents run with this attention, `refused: …`, or the type of the error."""
    with patch.object(attention, "packed_attention", attend):
        try:
            model = build(world, source, attention=choice)
        except ConfigError as error:
            return f"refused: {error}"
        except Exception as error:
            return type(error).__name__
    model(pack(ToySamples(), [0])).loss_sum.backward()
    return "packed" if model.is_packed else "one by one"


def built(world, source, leaking_rank, choice):
    """The outcome with an attention that leaks on one of the ranks, and the log."""
    attend = attention.packed_attention
    with heard() as lines:
        found = outcome(
            world,
            source,
            _leaking(attend) if world.rank == leaking_rank else attend,
            choice=choice,
        )
    return found, lines


REFUSALS = {
    "kernel": RuntimeError("varlen_attn needs a head size that divides by 8"),
    "value": ValueError("head_dim"),
    "not there": NotImplementedError("varlen_attn on this device"),
}
OTHERS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "memory of cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "device": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "peer": dist.DistBackendError("NCCL error"),
    "compiler": torch._inductor.exc.InductorError(RuntimeError("no C++ compiler"), None),
    "tracing": torch._dynamo.exc.TorchRuntimeError("a fake tensor"),
    "mistake": TypeError("packed_attention() got an unexpected keyword argument"),
}


def built_with_errors(world, source):
    """{kind of error that attention raises: outcome}."""
    return {
        kind: outcome(world, source, Mock(side_effect=error))
        for kind, error in (REFUSALS | OTHERS).items()
    }


def test_only_what_a_kernel_says_of_its_arguments_is_answered_with_other_attention(source):
    """A GPU that is full, lost or without a compiler has nothing to do with packing: `auto` would
    train several times slower.
    """
    (found,) = run_ranks(built_with_errors, 1, source)
    refused = found.pop("compiler")
    assert refused.startswith("refused: model.compile=true: torch cannot compile Qwen2ForCausalLM")
    assert "no C++ compiler" in refused and "Fix: install" in refused
    others = {kind: type(error).__name__ for kind, error in OTHERS.items()}
    del others["compiler"]
    assert found == dict.fromkeys(REFUSALS, "one by one") | others


def fails_on_one_rank(world, source):
    failing = patch.object(attention, "packed_attention", Mock(side_effect=OTHERS["memory"]))
    with failing if world.rank else nullcontext():
        build(world, source)


def test_a_rank_that_fails_in_the_self_check_leaves_at_once(source):
    """Its process ends, and the launcher the others; it told them its error where they did not
    listen, for a minute.
    """
    with started_ranks(fails_on_one_rank, 2, source) as ranks:
        (process, receiver) = ranks[1]
        assert receiver.poll(30), "it waits for the other rank"
        is_ok, text = pickle.loads(receiver.recv_bytes())
        process.join(10)
    assert not is_ok and "OutOfMemoryError: CUDA out of memory" in text and process.exitcode == 1


def test_auto_falls_back_on_all_ranks_when_packing_fails_the_self_check_of_one(source):
    warning = "packed documents fail the self-check: the "
    for found, lines in run_ranks(built, 2, source, 1, "auto"):
        assert found == "one by one"
        assert any(line.startswith(warning) for line in lines)
        told = "documents run one by one (slower): packed documents fail the self-check"
        assert any(line.endswith(told) for line in lines)


def test_what_is_asked_for_is_not_replaced(source):
    refusal = "refused: self-check failed: the loss of Qwen2ForCausalLM differs by"
    for found, _ in run_ranks(built, 2, source, 0, "packed"):
        assert found.startswith(refusal) and "model.attention=per_document may help" in found


def deterministic(world, source, is_possible):
    """Return the outcome of a start under `trainer.deterministic`, with or without an operation
    that has no deterministic kernel.
    """
    plain = attention.packed_attention

    def scattering(*args, **kwargs):
        if not is_possible:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return plain(*args, **kwargs)

    seeding.use_deterministic_kernels()
    found = outcome(world, source, scattering, choice="packed")
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
    return " ".join([found, *(os.environ[name] for name in names)])


def test_an_operation_without_a_deterministic_kernel_is_named_before_training(source):
    assert run_ranks(deterministic, 2, source, True) == ["packed :4096:8 Ring Simple"] * 2
    for refusal in run_ranks(deterministic, 2, source, False):
        assert refusal.startswith(
            "refused: self-check failed: trainer.deterministic=true is not possible with "
            "Qwen2ForCausalLM here: put_ does not have a deterministic implementation; "
            "model.attention=per_document may"
        )


def built_unlike_its_logits(world, source):
    with patch.object(packed_lm, "_is_head_all", lambda model: True):
        return outcome(world, source, attention.packed_attention)


ENCODER = {"pad_token_id": 0, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("family", "changes", "refusal"),
    [
        (
            "granite",
            {"logits_scaling": 4.0, "initializer_range": 0.5},
            "self-check failed: the loss of .* differs by .*; this model cannot be trained here$",
        ),
        ("camembert", ENCODER, "self-check failed: the logits of .* depend on later tokens"),
        ("bert", ENCODER, ".* shares parameters between layers"),
        (
            "qwen2",
            {"initializer_range": 1e38},
            "self-check failed: the logits of .* are not finite",
        ),
    ],
)
def test_an_architecture_that_cannot_be_trained_is_refused(tmp_path, family, changes, refusal):
    source = write_model_config(tmp_path, family, **changes)
    (found,) = run_ranks(built_unlike_its_logits, 1, source)
    assert re.match(f"refused: {refusal}", found), found


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


@pytest.mark.parametrize(
    ("model_type", "settings", "words", "message"),
    [
        ("llama", DYNAMIC, ["model.attention=packed", "data.max_length=4096"], "cannot be packed"),
        (
            "qwen3_vl",
            {},
            [],
            r"no separate language model for its text part \('qwen3_vl_text'\)",
        ),
        (
            "qwen2",
            {},
            ["model.freeze=[embed_tokens]", "optim.groups=[{match: norm}, {match: embed_tokens}]"],
            r"optim.groups\[1\].match': no trained parameter has a name that matches 'embed_tokens'",
        ),
        ("qwen2", {}, ["optim.groups=[{match: '('}]"], "is not a regular expression"),
        ("t5", {}, [], "an encoder-decoder model"),
        ("opt", {"layerdrop": 0.1}, [], r"\(layerdrop=0\.1 .*\nFix: set \"layerdrop\" to 0"),
        ("gemma3", {"quantization_config": {"quant_method": "gptq"}}, [], "is quantized"),
        (
            "gemma3",
            {"architectures": ["OwnModel"]},
            [],
            r"its class \(OwnModel\) is not in transformers",
        ),
        (
            "gemma3",
            WRAPPERS["gemma3"],
            [],
            r"model\.random_weights=true: the other parts .* have no weights",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_data_is_read(
    tmp_path, model_type, settings, words, message
):
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (rows := tmp_path / "rows.jsonl").write_text("{}\n")
    words = [
        *words,
        f"model.partial_pretrain={tmp_path}",
        "model.random_weights=true",
        f"data.train_files={rows}",
    ]
    is_read = AssertionError("data is prepared, or a tokenizer is read")
    with (
        patch.object(inputs, "_prepare", side_effect=is_read),
        patch.object(inputs.AutoTokenizer, "from_pretrained", side_effect=is_read),
        pytest.raises(ConfigError, match=message),
    ):
        inputs.prepare_inputs(load_config(words), progress=lambda: None)
