"""Files of W ranks load on V ranks: parameters and moments bit-equal, uneven and empty shards
included.

All pairs of few numbers of ranks; of many with `pytest --full`.
"""

from pathlib import Path
from typing import Any

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
from toy_runs import Recipe, Result, checkpoint_manager, moments_of, run

from trainer.checkpoint import layout

WORLD_SIZES = short_or_full((1, 3, 4), full=(1, 2, 3, 4, 6, 8))
HYBRID = short_or_full(((4, 2),), full=((4, 2), (8, 4), (6, 3)))
"""(ranks, fsdp_size): several copies of the parameters."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows that no world size divides (163, 97), and vectors of 2 rows: empty shards from 3
    ranks on.
    """
    return write_model_config(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        vocab_size=163,
        intermediate_size=97,
        hidden_size=8,
        head_dim=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def saved(source: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    """{how it was saved: (run directory, the state at step 6)}, with checkpoints of steps 2, 4,
    6.
    """
    root = tmp_path_factory.mktemp("saved")
    kinds = [(str(size), size, -1) for size in WORLD_SIZES] + [
        (f"{w} by {f}", w, f) for w, f in HYBRID
    ]
    found = {}
    for name, world_size, fsdp_size in kinds:
        (root / name).mkdir()
        found[name] = (
            root / name,
            run_ranks(run, world_size, root / name, source, Recipe(), fsdp_size=fsdp_size)[0],
        )
    return found


def load_all(
    world: Any, run_dirs: list[Path], source: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What this number of ranks makes of each checkpoint: whole parameters and moments."""
    found = []
    for run_dir in run_dirs:
        info = layout.inspect(run_dir / "global_step_6")
        assert info.manifest is not None
        model, start = build_toy_model(world, source), info.manifest.position
        parts = toy_run(world, model, ToySamples(), total_steps=6, start=start)
        manager = checkpoint_manager(world, run_dir.parent / "elsewhere", source, parts, Recipe())
        manager.load(info)
        found.append((full_parameters(parts.model), moments_of(parts)))
    return found


@pytest.mark.parametrize(
    ("world_size", "fsdp_size"), [*((size, -1) for size in WORLD_SIZES), *HYBRID]
)
def test_every_checkpoint_loads_bit_equal(saved, source, world_size, fsdp_size):
    run_dirs = [run_dir for run_dir, _ in saved.values()]
    loaded = run_ranks(load_all, world_size, run_dirs, source, fsdp_size=fsdp_size)[0]
    for (name, (_, truth)), (parameters, moments) in zip(saved.items(), loaded, strict=True):
        assert differing(parameters, truth.parameters) == [], f"saved on {name}"
        assert differing(moments, truth.moments) == [], f"saved on {name}"
