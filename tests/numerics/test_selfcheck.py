"""The self-check sees what it is there for: each fault below is made on purpose, in fp32 and in bf16."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from toy import build_toy_model, write_model_config

from trainer.model import attention, packed_lm, selfcheck
from trainer.model.attention import DocumentLengths


def _leaking(original: Callable[..., Any]) -> Callable[..., Any]:
    def one_document(*args: Any, **kwargs: Any) -> Any:
        lengths = DocumentLengths((sum(kwargs["lengths"].seqlens),))
        return original(*args, **{**kwargs, "lengths": lengths})

    return one_document


def _shifted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Document bounds one token late: a leak of a single token."""

    def late(*args: Any, **kwargs: Any) -> Any:
        first, *others, last = kwargs["lengths"].seqlens
        lengths = DocumentLengths((first + 1, *others, last - 1))
        return original(*args, **{**kwargs, "lengths": lengths})

    return late


def _running_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    def arguments(model: Any, batch: Any) -> dict[str, Any]:
        positions = torch.arange(len(batch.position_ids_T))[None]
        return {**original(model, batch), "position_ids": positions}

    return arguments


def _fault(name: str) -> AbstractContextManager[Any]:
    if name == "leak":
        return patch.object(attention, "packed_attention", _leaking(attention.packed_attention))
    if name == "leak of one token":
        return patch.object(attention, "packed_attention", _shifted(attention.packed_attention))
    if name == "positions":
        return patch.object(packed_lm, "forward_arguments", _running_positions(packed_lm.forward_arguments))
    if name == "logits":
        return patch.object(packed_lm, "_LOGIT_TRANSFORMS", ())
    return nullcontext()


def errors(world: Any, sources: dict[str, Any], param_dtype: str) -> dict[str, float]:
    """{fault: packing error}, every model as its initialisation makes it."""
    found = {}
    for name, source in sources.items():
        with _fault(name):
            model = build_toy_model(world, source, param_dtype=param_dtype)
            found[name] = selfcheck.packing_error(model, world.device, max_length=64)
            assert model.forward.__name__.startswith("_forward") and model.config._attn_implementation == "packed"
    return found


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_faults_exceed_the_tolerance(tmp_path: Path, param_dtype: str) -> None:
    """Absolute positions (gpt2) for the fault of positions: rotary ones are relative and would not change."""
    granite = {"logits_scaling": 4.0, "initializer_range": 0.5}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "no fault": ("qwen2", {}),
        "leak": ("qwen2", {}),
        "leak of one token": ("qwen2", {}),
        "positions": ("gpt2", {}),
        "logits": ("granite", granite),
        "no fault, scaled logits": ("granite", granite),
    }
    sources = {
        name: write_model_config(tmp_path / name, model_type, **{"initializer_range": 0.02, **changes})
        for name, (model_type, changes) in kinds.items()
    }
    found = run_ranks(errors, 2, sources, param_dtype)
    assert found[0] == found[1]
    tolerance = selfcheck.TOLERANCE[getattr(torch, param_dtype)]
    right = {name: found[0].pop(name) for name in ("no fault", "no fault, scaled logits")}
    if param_dtype == "bfloat16":
        del found[0]["positions"]  # an untrained model hardly uses its positions: below the rounding
    assert max(right.values()) < tolerance / 2, right
    assert min(found[0].values()) > 2 * tolerance, found[0]
