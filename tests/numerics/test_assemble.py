"""From a config.json to a model that trains, or to words that help: what is refused, what
`auto` falls back to.
"""

import logging
import os
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch._dynamo.exc
import torch._inductor.exc
import torch.distributed as dist
from family_trials import family_config
from ranks import run_ranks, started_ranks
from test_selfcheck import _leaking
from toy import ToySamples, model_config, write_model_config
from transformers import AutoConfig, PretrainedConfig

from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model import attention, packed_lm
from trainer.model.assemble import build_model, design_model
from trainer.model.packed_lm import notes
from trainer.model.pretrained import ModelSource
from trainer.run import inputs
from trainer.run.compose import load_config
from trainer.runtime import seeding


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def built(world: Any, source: ModelSource, faulty_rank: int, choice: str) -> tuple[str, list[str]]:
    """(how documents run, or why not; what is said) with an attention that leaks on one of the
    ranks.
    """
    logger, lines = logging.getLogger("trainer"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    leaking = (
        _leaking(attention.packed_attention)
        if world.rank == faulty_rank
        else attention.packed_attention
    )
    with patch.object(attention, "packed_attention", leaking):
        try:
            model: Any = build_model(
                design_model(model_config(attention=choice), source, max_length=64),
                world=world,
                seed=1,
            )
        except ConfigError as error:
            return f"refused: {error}", lines.lines
    loss = model(pack(ToySamples(), [0])).loss_sum
    loss.backward()
    return "packed" if model.is_packed else "one by one", lines.lines


def errors(kind: str) -> Exception:
    found = {
        "kernel": RuntimeError("varlen_attn needs a head size that divides by 8"),
        "value": ValueError("head_dim"),
        "not there": NotImplementedError("varlen_attn on this device"),
        "memory": torch.OutOfMemoryError("CUDA out of memory"),
        "device": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        "peer": dist.DistBackendError("NCCL error"),
        "compiler": torch._inductor.exc.InductorError(RuntimeError("no C++ compiler"), None),
        "tracing": torch._dynamo.exc.TorchRuntimeError("a fake tensor"),
        "mistake": TypeError("packed_attention() got an unexpected keyword argument"),
    }
    return found[kind]


REFUSALS = ("kernel", "value", "not there")


def built_with_errors(
    world: Any, source: ModelSource, failing_rank: int, kinds: list[str]
) -> dict[str, str]:
    """{kind of error that attention raises on a rank: how documents run, or the type of the
    error that got out}.
    """
    found = {}
    for kind in kinds:
        error = errors(kind)
        attend = (
            attention.packed_attention if world.rank != failing_rank else Mock(side_effect=error)
        )
        with patch.object(attention, "packed_attention", attend):
            try:
                model = build_model(
                    design_model(model_config(attention="auto"), source, max_length=64),
                    world=world,
                    seed=1,
                )
                found[kind] = "packed" if model.is_packed else "one by one"
            except Exception as raised:
                found[kind] = type(raised).__name__
    return found


def test_only_what_a_kernel_says_of_its_arguments_is_answered_with_other_attention(
    tmp_path: Path,
) -> None:
    """A card that is full, lost or without a compiler is none of packing: `auto` would train
    several times slower.
    """
    source = write_model_config(tmp_path)
    (found,) = run_ranks(built_with_errors, 1, source, 0, kinds := [*REFUSALS, *sorted(OTHERS)])
    assert found == {
        kind: "one by one" if kind in REFUSALS else type(errors(kind)).__name__ for kind in kinds
    }


OTHERS = ("memory", "device", "peer", "compiler", "tracing", "mistake")


def fails_on_one_rank(world: Any, source: ModelSource) -> None:
    with (
        patch.object(attention, "packed_attention", Mock(side_effect=errors("memory")))
        if world.rank
        else nullcontext()
    ):
        build_model(design_model(model_config(), source, max_length=64), world=world, seed=1)


def test_a_rank_that_fails_in_the_self_check_leaves_at_once(tmp_path: Path) -> None:
    """Its process ends, and the launcher the others; it told them its error where they did not
    listen, for a minute.
    """
    with started_ranks(fails_on_one_rank, 2, write_model_config(tmp_path)) as ranks:
        (process, receiver) = ranks[1]
        assert receiver.poll(30), "it waits for the other rank"
        is_ok, text = pickle.loads(receiver.recv_bytes())
        process.join(10)
    assert not is_ok and "OutOfMemoryError: CUDA out of memory" in text and process.exitcode == 1


def test_auto_falls_back_on_all_ranks_when_packing_fails_the_self_check_of_one(
    tmp_path: Path,
) -> None:
    found = run_ranks(built, 2, write_model_config(tmp_path), 1, "auto")
    warning = (
        "WARNING: packed documents fail the self-check: the loss of Qwen2ForCausalLM differs by"
    )
    for outcome, lines in found:
        assert outcome == "one by one"
        assert any(line.startswith(warning) for line in lines)
        assert "INFO: documents run one by one (slower): packed ones fail the self-check" in lines


def deterministic(world: Any, source: ModelSource, is_possible: bool) -> str:
    """What becomes of a model under `trainer.deterministic`, with an operation in it that has
    no such kernel or not.
    """

    def scattering(*args: Any, **kwargs: Any) -> Any:
        if not is_possible:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return packed(*args, **kwargs)

    packed = attention.packed_attention
    seeding.use_deterministic_kernels()
    with patch.object(attention, "packed_attention", scattering):
        try:
            build_model(
                design_model(model_config(attention="packed"), source, max_length=64),
                world=world,
                seed=1,
            )
        except ConfigError as error:
            return str(error)
    return f"built with {os.environ['CUBLAS_WORKSPACE_CONFIG']} {os.environ['NCCL_ALGO']} {os.environ['NCCL_PROTO']}"


def test_an_operation_without_a_deterministic_kernel_is_named_before_training(
    tmp_path: Path,
) -> None:
    source = write_model_config(tmp_path)
    assert run_ranks(deterministic, 2, source, True) == ["built with :4096:8 Ring Simple"] * 2
    for refusal in run_ranks(deterministic, 2, source, False):
        assert refusal.startswith(
            "self-check failed: trainer.deterministic=true is not possible with Qwen2ForCausalLM"
        )
        assert (
            "here: put_ does not have a deterministic implementation; model.attention=per_document "
            "may" in refusal
        )


def test_what_is_asked_for_is_not_replaced(tmp_path: Path) -> None:
    for outcome, _ in run_ranks(built, 2, write_model_config(tmp_path), 0, "packed"):
        assert outcome.startswith(
            "refused: self-check failed: the loss of Qwen2ForCausalLM differs by"
        )
        assert "model.attention=per_document may help" in outcome


def test_an_architecture_that_fails_both_ways_is_refused(tmp_path: Path) -> None:
    source = write_model_config(tmp_path, "granite", logits_scaling=4.0, initializer_range=0.5)
    (outcome, _), *_ = run_ranks(built_unknown_logits, 1, source)
    assert outcome.startswith(
        "refused: self-check failed: the loss of GraniteForCausalLM differs by"
    )
    assert outcome.endswith("; it cannot be trained here")


def built_unknown_logits(world: Any, source: ModelSource) -> tuple[str, list[str]]:
    with patch.object(packed_lm, "_is_head_all", lambda model: True):
        return built(world, source, -1, "auto")


def _encoder(path: Path, model_type: str) -> ModelSource:
    return write_model_config(path, model_type, pad_token_id=0, tie_word_embeddings=False)


def test_an_encoder_is_refused_since_its_tokens_see_later_ones(tmp_path: Path) -> None:
    (outcome, _), *_ = run_ranks(built, 1, _encoder(tmp_path, "camembert"), -1, "auto")
    assert outcome.startswith(
        "refused: self-check failed: the logits of CamembertForCausalLM change with tokens that"
    )


def test_a_parameter_that_becomes_shared_with_the_head_is_refused(tmp_path: Path) -> None:
    (outcome, _), *_ = run_ranks(built, 1, _encoder(tmp_path, "bert"), -1, "auto")
    assert (
        outcome.startswith("refused:")
        and "BertLMHeadModel shares parameters between layers" in outcome
    )


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_layers_that_share_parameters_are_refused(tmp_path: Path, family: str) -> None:
    """As the released models have them: one block of attention in several places."""
    family_config(family).save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), random_weights=True)
    with pytest.raises(ConfigError, match="shares parameters between layers"):
        packed_lm.build_on_meta(source, is_packed=False)


_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


@pytest.mark.parametrize(
    "words", [["t5"], ["llama", "model.attention=packed", "data.max_length=4096"]]
)
def test_a_model_is_refused_before_any_data_is_read(tmp_path: Path, words: list[str]) -> None:
    AutoConfig.for_model(words[0], **(_DYNAMIC if words[0] == "llama" else {})).save_pretrained(
        tmp_path
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    (rows := tmp_path / "rows.jsonl").write_text("{}\n")
    found = [
        f"model.partial_pretrain={tmp_path}",
        "model.random_weights=true",
        f"data.train_files={rows}",
    ]
    with (
        patch.object(inputs, "_prepare", side_effect=AssertionError("data is prepared")),
        patch.object(
            inputs.AutoTokenizer,
            "from_pretrained",
            side_effect=AssertionError("a tokenizer is read"),
        ),
        pytest.raises(ConfigError, match=r"an encoder with a decoder|cannot be packed"),
    ):
        inputs.prepare_inputs(load_config([*found, *words[1:]]), progress=lambda: None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AutoConfig.for_model("qwen2"), []),
        (AutoConfig.for_model("gpt2"), [r"attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1$"]),
        (
            AutoConfig.for_model("phimoe", router_jitter_noise=0.0),
            ["drawn at random in training, by step and rank: its router's choice of experts"],
        ),
    ],
)
def test_what_training_draws_is_said(config: PretrainedConfig, expected: list[str]) -> None:
    found = list(notes(config))
    assert len(found) == len(expected)
    for note, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, note), note


def test_one_document_per_forward_as_configured_says_so(tmp_path: Path) -> None:
    source = write_model_config(tmp_path)
    config = model_config(attention="per_document")
    assert design_model(config, source, max_length=64).reason == "model.attention=per_document"
