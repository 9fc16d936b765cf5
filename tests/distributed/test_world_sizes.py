"""Files of W ranks load on V ranks: parameters and moments are bit-equal, even with uneven and
empty shards.

This tests all pairs of a few numbers of ranks, or of many with `pytest --full`.
"""

import pytest
from ranks import run_ranks
from sweeps import short_or_full
from toy import (
    ToySamples,
    build_toy_model,
    differing,
    full_parameters,
    toy_run,
    write_model_config,
)
from toy_runs import Recipe, checkpoint_manager, moments_of, run

from trainer.checkpoint import layout

WORLD_SIZES = short_or_full((1, 4), full=(1, 2, 3, 4, 6, 8))
HYBRID = short_or_full(((4, 2),), full=((4, 2), (8, 4), (6, 3)))
MESHES = [*((size, -1) for size in WORLD_SIZES), *HYBRID]
"""(ranks, fsdp_size): the last entries have several copies of the parameters."""


@pytest.fixture(scope="module")
def source(root):
    """Rows that no world size divides (163, 97), and vectors of 2 rows: empty shards from 3
    ranks on.
    """
    return write_model_config(
        root / "model",
        "qwen3",
        vocab_size=163,
        intermediate_size=97,
        hidden_size=8,
        head_dim=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def saved(source, root):
    """{run directory: the state at step 6}, with checkpoints of steps 2, 4, 6."""
    found = {}
    for size, fsdp_size in MESHES:
        run_dir = root / f"{size} by {fsdp_size}"
        found[run_dir] = run_ranks(run, size, run_dir, source, Recipe(), fsdp_size=fsdp_size)[0]
    return found


def load_all(world, run_dirs, source):
    """Load each checkpoint on this number of ranks; return whole parameters and moments."""
    found = []
    for run_dir in run_dirs:
        info = layout.inspect(run_dir / "global_step_6")
        model = build_toy_model(world, source)
        start = info.manifest.position
        parts = toy_run(world, model, ToySamples(), total_steps=6, start=start)
        manager = checkpoint_manager(world, run_dir.parent / "elsewhere", source, parts, Recipe())
        manager.load(info)
        found.append((full_parameters(parts.model), moments_of(parts)))
    return found


@pytest.mark.parametrize(("world_size", "fsdp_size"), MESHES)
def test_every_checkpoint_loads_bit_equal(saved, source, world_size, fsdp_size):
    loaded = run_ranks(load_all, world_size, list(saved), source, fsdp_size=fsdp_size)[0]
    for (run_dir, truth), (parameters, moments) in zip(saved.items(), loaded, strict=True):
        assert differing(parameters, truth.parameters) == [], run_dir
        assert differing(moments, truth.moments) == [], run_dir
