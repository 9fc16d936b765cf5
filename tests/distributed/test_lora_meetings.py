"""LoRA beside other keys: offload, recomputation, bfloat16 states and parameters, muon, a
rollback.
"""

import math
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import LORA, curve, start
from test_lora import root as root
from test_lora import words as words
from toy import differing, relative
from whole_equality import compare_runs
from whole_runs import stop_in_step

from trainer.checkpoint.shards import read_torch

LOW = (*LORA, "optim.state_dtype=bfloat16", "model.master_dtype=bfloat16")
UNDONE = (
    *LORA,
    "trainer.max_ckpt_to_keep=null",
    "trainer.guard.on_diverging=rollback",
    "trainer.total_training_steps=24",
)
BAD_STEP = 20
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain": (2, LORA),
    "offload": (2, (*LORA, "model.fsdp_config.cpu_offload=true")),
    "host": (2, (*LORA, "model.enable_gradient_checkpointing=offload")),
    "low": (2, LOW),
    "muon 1": (1, (*LORA, "optim.name=muon")),
    "muon 2": (2, (*LORA, "optim.name=muon")),
}


@pytest.fixture(scope="module")
def runs(words: tuple[str, ...], root: Path) -> dict[str, Path]:
    for name, (num_ranks, changes) in CASES.items():
        start(root / name, num_ranks, *words, *changes)
    return {name: root / name for name in CASES}


def adapters(run_dir: Path, step: int = 4) -> dict[str, torch.Tensor]:
    """What rank 0 of two holds of each adapter."""
    file = run_dir / f"global_step_{step}" / "model_world_size_2_rank_0.pt"
    found = {
        name: tensor.to_local() for name, tensor in read_torch(file).items() if ".lora_" in name
    }
    assert found
    return found


@pytest.mark.parametrize("name", ["offload", "host"])
def test_memory_is_saved_without_another_bit(runs, name):
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert curve(runs[name], key) == curve(runs["plain"], key), key
    assert differing(adapters(runs[name]), adapters(runs["plain"])) == []


def test_muon_does_not_depend_on_ranks(runs):
    assert relative(curve(runs["muon 2"]), curve(runs["muon 1"])) < 1e-6
    assert curve(runs["muon 2"])[-1] != curve(runs["plain"])[-1]


def test_bfloat16_states_and_adapters_go_on_bit_equal(words, runs, tmp_path):
    assert {value.dtype for value in adapters(runs["low"]).values()} == {torch.bfloat16}
    run_dir = tmp_path / "run"
    start(run_dir, 2, *words, *LOW, code=None, before=partial(stop_in_step, 4, signal.SIGKILL))
    start(run_dir, 2, *words, *LOW)
    found = compare_runs(runs["low"], run_dir, steps=4)
    assert found.num_equal > 10 and not found.differences, found.differences


def spoil_a_gradient() -> None:
    """In every rank: the norm of one step is no number, once, and the guard gives up at the
    first such step.
    """
    from trainer.train import guard, step

    guard.NONFINITE_LIMITS = ((1, 1),)
    whole, calls = step.local_square_sum, iter(range(1, 100))

    def spoiled(parameters: Any) -> Any:
        found = whole(parameters)
        return found * math.nan if next(calls) == BAD_STEP else found

    step.local_square_sum = spoiled


def test_a_rollback_takes_adapters_back(words, tmp_path):
    """To the checkpoint before, past the batches: as a run on another number of ranks does it,
    and exported.
    """
    found = {}
    for num_ranks in (1, 2):
        run_dir = tmp_path / f"ranks {num_ranks}"
        output = start(run_dir, num_ranks, *words, *UNDONE, before=spoil_a_gradient)
        assert "rolled back" in output or "rolling back" in output, output
        found[num_ranks] = curve(run_dir)
        assert all(map(math.isfinite, found[num_ranks]))
    assert relative(found[2], found[1]) < 1e-6
    run_dir = tmp_path / "ranks 2"
    step = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
    assert (run_dir / f"global_step_{step}" / "huggingface" / "adapter_model.safetensors").exists()
    assert all(tensor.isfinite().all() for tensor in adapters(run_dir, step).values())
