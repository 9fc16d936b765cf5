"""verl's own model_merger reads our shards, and its output equals our export bit for bit.

Needs VERL_PYTHON, an interpreter that has verl 0.9.1 and its merger's dependencies.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from exports import tensors_in
from ranks import run_ranks
from tokenizers import Tokenizer, models
from toy import write_model_config
from toy_runs import Recipe, run
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(
        "VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with verl"
    ),
]
RECIPE = Recipe(total_steps=2, save_freq=-1, checkpoint={"export_dtype": "bfloat16"})
"""Save with an export in the dtype that verl's merger writes."""
CASES = {"shards": (2, -1, True), "replicas": (4, 2, True), "untied": (3, -1, False)}
"""(Ranks, fsdp_size, whether the head is tied)."""


def write_model(path, **changes):
    """A model directory with a tokenizer, which the merger copies; rows that no world size
    divides.
    """
    source = write_model_config(path, vocab_size=163, intermediate_size=97, **changes)
    words = models.WordLevel({"<unk>": 0, "hello": 1, "</s>": 3}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return source


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    for name, (world_size, fsdp_size, is_tied) in CASES.items():
        source = write_model(root / name / "model", tie_word_embeddings=is_tied)
        run_ranks(run, world_size, root / name / "run", source, RECIPE, fsdp_size=fsdp_size)
    return {name: root / name / "run" / "global_step_2" for name in CASES}


@pytest.fixture(scope="module")
def all_merged(checkpoints, tmp_path_factory):
    """A directory for each case, written by one process: verl takes longer to import than to
    merge.
    """
    root = tmp_path_factory.mktemp("theirs")
    directory = Path(__file__).parent
    jobs = [(checkpoint, root / name) for name, checkpoint in checkpoints.items()]
    script = str(directory / "merge_with_verl.py")
    result = subprocess.run(
        [os.environ["VERL_PYTHON"], script, json.dumps(jobs, default=str)],
        env={**os.environ, "PYTHONPATH": str(directory), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_merged_shards_equal_the_export(checkpoints, all_merged, case):
    checkpoint = checkpoints[case]
    merged = all_merged / case
    theirs = tensors_in(merged)
    ours = tensors_in(checkpoint / "huggingface")
    assert set(theirs) == set(ours), "a tied head is in neither"
    assert ("lm_head.weight" in ours) is not CASES[case][2]
    for name, value in ours.items():
        assert theirs[name].dtype == value.dtype == torch.bfloat16
        assert torch.equal(theirs[name], value), name
    reloaded = AutoModelForCausalLM.from_pretrained(merged)
    assert all(torch.equal(reloaded.get_parameter(name), value) for name, value in ours.items())
