"""Runs with moments and parameters in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toy import write_model_config
from toy_runs import Recipe, Result, begun, run
from transformers import AutoModelForCausalLM

STATES: dict[str, Any] = {"optim": {"state_dtype": "bfloat16"}}
LOW: dict[str, Any] = STATES | {"model": {"master_dtype": "bfloat16"}}
STEPS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows that no number of ranks divides."""
    changes = {"vocab_size": 163, "intermediate_size": 97, "tie_word_embeddings": False}
    return write_model_config(tmp_path_factory.mktemp("model"), "qwen3", **changes)


@pytest.fixture(scope="module")
def whole(source: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run without interruption: its directory, with all checkpoints, and its end."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, run_ranks(run, 2, run_dir, source, Recipe(STEPS), **LOW)[0]


def test_the_export_holds_the_parameters_as_they_are(source, whole):
    run_dir, expected = whole
    exported = AutoModelForCausalLM.from_pretrained(
        run_dir / "global_step_6" / "huggingface", dtype=torch.float32
    )
    assert all(
        torch.equal(exported.state_dict()[name], value.float())
        for name, value in expected.parameters.items()
    )


def test_a_checkpoint_in_bfloat16_goes_on_in_float32_and_not_the_other_way(source, whole, tmp_path):
    """Widening is exact. What narrowing would lose is not lost: refused, with the key that goes
    on.
    """
    widened = run_ranks(run, 1, begun(whole[0], tmp_path / "wide", 4), source, Recipe(STEPS))[0]
    assert widened.start_step == 4
    assert {value.dtype for value in (widened.loaded | widened.loaded_moments).values()} == {
        torch.float32
    }
    for changes, key in (
        (STATES, "optim.state_dtype"),
        ({"model": LOW["model"]}, "model.master_dtype"),
    ):
        again = begun(tmp_path / "wide", tmp_path / key, STEPS)
        with pytest.raises(BaseException, match=f"{key}=float32"):
            run_ranks(run, 1, again, source, Recipe(STEPS + 2), **changes)
