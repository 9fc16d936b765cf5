"""`accept` in bfloat16: what rounding may change is measured, in a run and of each kernel, not chosen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

from trainer.acceptance import kernels
from trainer.acceptance.lines import FAIL, LINES, OK
from trainer.model import attention

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(("difference", "verdict"), [(3e-3, OK), (5e-3, FAIL)])
def test_in_bfloat16_as_much_is_allowed_as_rounding_changes(difference: float, verdict: str) -> None:
    """Four times the largest difference between the run and the same in float32, of each number its own."""

    def run(loss: float) -> SimpleNamespace:
        return SimpleNamespace(rows=lambda: [{"train/loss": loss, "train/grad_norm": 1.0}] * 4)

    config = SimpleNamespace(model=SimpleNamespace(fsdp_config=SimpleNamespace(param_dtype="auto")))
    runs = {"straight": run(1.0), "one_rank": run(1.0 + difference), "in_float32": run(1.001)}
    evidence: Any = SimpleNamespace(trial=SimpleNamespace(num_ranks=2), config=config, **runs)
    found = LINES["ranks"][1](evidence)
    assert found.verdict == verdict and "(allowed 4e-03)" in found.text, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_kernels_lie_within_rounding_and_wrong_ones_do_not(dtype: torch.dtype, monkeypatch: Patch) -> None:
    """In each dtype alone: on a card another kernel computes each."""
    errors, reasons = kernels.measure(torch.device("cpu"), [dtype])
    assert not reasons and max(errors.values()) < 0.8, errors
    attend, rotate, norm = attention.grouped_attention, modeling_qwen2.rotate_half, kernels.rms_norm
    monkeypatch.setattr(attention, "grouped_attention", lambda query, *more: attend(query * 1.05, *more))
    monkeypatch.setattr(modeling_qwen2, "rotate_half", lambda x: rotate(x) * 1.05)
    monkeypatch.setattr(kernels, "rms_norm", lambda *inputs: norm(*inputs) * 1.05)
    wrong, _ = kernels.measure(torch.device("cpu"), [dtype])
    assert min(wrong[name] for name in ("attention", "rotary", "norm")) > 1, wrong
