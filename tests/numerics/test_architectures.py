"""Every family of models (a sample without `--full`): loaded bit-equal to transformers, its loss and
gradients as plain, exported whole.

Our side loads a tiny random model, sharded, and runs three documents: together where the family is
packed, and each alone, with empty micro-batches in between; the other side is `from_pretrained`
with eager attention, one document per forward. The loss that is compared is the cross-entropy
alone: the router loss that some mixtures of experts add follows the step before. How each family
runs is what the table of docs/models.md says, from a run of its own (`tests/support_table.py`,
which also tries what is too dear here).
"""

import traceback

import pytest
from families import FAMILIES, VARIANTS
from family_trials import REFUSED, first_step, save_model
from ranks import run_ranks
from safetensors.torch import load_file
from small_files import read_json
from support_table import TABLE
from sweeps import some
from toy import differing
from transformers import logging

NAMES = (*FAMILIES, *VARIANTS)
TRIED = TABLE.read()["families"]
DOZEN = (
    "llama",
    "gpt2",
    "gemma3_text",
    "granite",
    "qwen3_moe",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "qwen3_next",
    "mamba2",
    "falcon_h1",
    "lfm2",
)
ON_TWO = some(DOZEN, 6)
DRAWN = {*some(FAMILIES, 50), *VARIANTS, *ON_TWO}
SIZES = {1: [name for name in NAMES if name in DRAWN], 2: ON_TWO}
CASES = [
    pytest.param(size, name, id=f"{name}, {size} ranks")
    for size, names in SIZES.items()
    for name in names
]
TRAINED = [case for case in CASES if TRIED[case.values[1]]["how"] != REFUSED]


def run_all(world, root, names):
    """{family: results, or the traceback}."""
    logging.disable_progress_bar()
    results = {}
    for name in names:
        try:
            if world.size == 1:
                save_model(root / name, name)
            results[name] = first_step(world, root / name, root / f"{name}-export-{world.size}")
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results(root):
    return {
        size: run_ranks(run_all, size, root, names, timeout_s=400)[0]
        for size, names in SIZES.items()
    }


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_loss_and_gradients_equal_plain_transformers(results, num_ranks, name):
    result = results[num_ranks][name]
    assert isinstance(result, dict), result
    again = f"the table says otherwise: python tests/support_table.py {name!r}"
    assert (result["how"], result["reason"]) == (TRIED[name]["how"], TRIED[name]["reason"]), again
    if result["how"] == REFUSED:
        return
    assert result["loss error"] < 1e-6
    assert result["norm error"] < 1e-5
    assert result["gradients missing"] == []
    assert result["gradient error"] < 1e-5


@pytest.mark.covers("S3.23")
@pytest.mark.parametrize(("num_ranks", "name"), TRAINED)
def test_the_export_is_what_transformers_would_save(results, root, num_ranks, name):
    """Names, bits and configuration equal those in the files of transformers."""
    assert isinstance(results[num_ranks][name], dict), results[num_ranks][name]
    export = root / f"{name}-export-{num_ranks}"
    ours, theirs = (load_file(path / "model.safetensors") for path in (export, root / name))
    assert differing(ours, theirs) == []
    config, their_config = (read_json(path / "config.json") for path in (export, root / name))
    assert config.pop("torch_dtype") == "float32"
    assert config | {"dtype": "float32"} == their_config
