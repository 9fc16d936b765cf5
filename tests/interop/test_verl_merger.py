"""verl's own model_merger reads our shards: its output equals our export bit by bit.

Needs VERL_PYTHON, an interpreter that has verl 0.9.1 and its merger's dependencies.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from toy import ToySamples, build_toy_model, toy_run, write_model_config
from toy_runs import Recipe, checkpoint_manager, save_now, trainer_config
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trainer.train.fit import fit

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(
        "VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with verl"
    ),
]
STEP = 2
CASES = {"shards": (2, -1, True), "replicas": (4, 2, True), "untied": (3, -1, False)}
"""(Ranks, fsdp_size, whether the head is tied)."""


def save(world: Any, run_dir: Path, source: Any) -> None:
    """Train a few steps and save, with an export in the dtype that verl's merger writes."""
    run_dir.mkdir(exist_ok=True)
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=STEP)
    assert fit(parts) == 0
    config = trainer_config(run_dir, Recipe())
    config = replace(config, checkpoint=replace(config.checkpoint, export_dtype="bfloat16"))
    with mock.patch("toy_runs.trainer_config", return_value=config):
        manager = checkpoint_manager(world, run_dir, source, parts, Recipe())
    save_now(manager, parts, is_required=True)


def write_model(path: Path, **changes: Any) -> Any:
    """A model directory with a tokenizer, which the merger copies; rows that no world size
    divides.
    """
    source = write_model_config(path, vocab_size=163, intermediate_size=97, **changes)
    words = models.WordLevel({"<unk>": 0, "hello": 1, "</s>": 3}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return source


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def run_in_verl(script: str, *arguments: str) -> None:
    """Run a script of this directory with the interpreter that has verl; fails with what it
    printed last.
    """
    directory = Path(__file__).parent
    result = subprocess.run(
        [os.environ["VERL_PYTHON"], str(directory / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(directory), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]


def merge(*jobs: tuple[Path, Path, Path | None]) -> None:
    run_in_verl("merge_with_verl.py", json.dumps(jobs, default=str))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ours")
    for name, (world_size, fsdp_size, is_tied) in CASES.items():
        source = write_model(root / name / "model", tie_word_embeddings=is_tied)
        run_ranks(save, world_size, root / name / "run", source, fsdp_size=fsdp_size)
    return {name: root / name / "run" / f"global_step_{STEP}" for name in CASES}


@pytest.fixture(scope="module")
def all_merged(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each case, written by one process: verl takes longer to import than to
    merge.
    """
    root = tmp_path_factory.mktemp("theirs")
    merge(*((checkpoint, root / name, None) for name, checkpoint in checkpoints.items()))
    return root


@pytest.mark.parametrize("case", CASES)
def test_merged_shards_equal_the_export(checkpoints, all_merged, case):
    checkpoint, merged = checkpoints[case], all_merged / case
    theirs, ours = tensors(merged), tensors(checkpoint / "huggingface")
    assert set(theirs) == set(ours), "a tied head is in neither"
    assert ("lm_head.weight" in ours) is not CASES[case][2]
    for name, value in ours.items():
        assert theirs[name].dtype == value.dtype == torch.bfloat16
        assert torch.equal(theirs[name], value), name
    reloaded = AutoModelForCausalLM.from_pretrained(merged)
    assert all(torch.equal(reloaded.get_parameter(name), value) for name, value in ours.items())


def test_verl_finds_the_export_equal_to_the_shards(checkpoints):
    """The merger's own comparison: `python -m verl.model_merger test`; a head that is tied, and
    one that is not.
    """
    compared = (checkpoints["shards"], checkpoints["untied"])
    merge(*((checkpoint, Path("unused"), checkpoint / "huggingface") for checkpoint in compared))
