"""Runs with moments and parameters in bfloat16."""

import pytest
import torch
from ranks import run_ranks
from toy import write_model_config
from toy_runs import Recipe, begun, run

STATES = {"optim": {"state_dtype": "bfloat16"}}
LOW = STATES | {"model": {"master_dtype": "bfloat16"}}
STEPS = 6


@pytest.fixture(scope="module")
def source(root):
    """Rows that no number of ranks divides."""
    changes = {"vocab_size": 163, "intermediate_size": 97, "tie_word_embeddings": False}
    return write_model_config(root, "qwen3", **changes)


def test_a_checkpoint_in_bfloat16_goes_on_in_float32_and_not_the_other_way(source, tmp_path):
    """Widening is exact. What narrowing would lose is not lost: refused, with the key that goes
    on.
    """
    run_ranks(run, 2, tmp_path / "narrow", source, Recipe(STEPS), **LOW)
    wide = begun(tmp_path / "narrow", tmp_path / "wide", 4)
    widened = run_ranks(run, 1, wide, source, Recipe(STEPS))[0]
    assert widened.start_step == 4
    assert {value.dtype for value in (widened.parameters | widened.moments).values()} == {
        torch.float32
    }
    for changes, key in (
        (STATES, "optim.state_dtype"),
        ({"model": LOW["model"]}, "model.master_dtype"),
    ):
        again = begun(wide, tmp_path / key, STEPS)
        with pytest.raises(BaseException, match=f"{key}=float32"):
            run_ranks(run, 1, again, source, Recipe(STEPS + 2), **changes)
