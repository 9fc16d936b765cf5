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
from toy_runs import Recipe, Result, begun, checkpoint_manager, moments_of, run

from trainer.checkpoint import layout

WORLD_SIZES = short_or_full((1, 3, 4), full=(1, 2, 3, 4, 6, 8))
HYBRID = short_or_full(((4, 2),), full=((4, 2), (8, 4), (6, 3)))
"""(ranks, fsdp_size): several copies of the parameters."""
MIB = 2**20


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
        parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=6)
        manager = checkpoint_manager(world, run_dir.parent / "elsewhere", source, parts, Recipe())
        manager.load(layout.inspect(run_dir / "global_step_6"))
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


@pytest.mark.parametrize("first", short_or_full((4,), full=(1, 2, 4, 8)))
def test_the_same_samples_follow_on_any_number_of_ranks(saved, source, first, tmp_path):
    """From 2 steps on `first` ranks through 3 ranks and back: losses as on one rank throughout,
    within rounding.
    """
    there_dir = begun(saved[str(first)][0], tmp_path / "there", 2)
    there = run_ranks(run, 3, there_dir, source, Recipe())[0]
    back_dir = begun(there_dir, tmp_path / "back", 4)
    back = run_ranks(run, first, back_dir, source, Recipe())[0]
    assert (there.start_step, back.start_step) == (2, 4)
    losses = saved[str(first)][1].losses | there.losses | back.losses
    for step, (loss, norm) in saved["1"][1].losses.items():
        assert losses[step] == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5)), (
            f"step {step}"
        )


def anonymous_memory_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def memory_of_loading(world: Any, run_dir: Path, source: Any) -> tuple[int, int]:
    """(bytes of this rank's state, bytes of memory that loading took beside it)."""
    parts = toy_run(world, build_toy_model(world, source), ToySamples(), total_steps=6)
    manager = checkpoint_manager(world, run_dir.parent / "elsewhere", source, parts, Recipe())
    state_bytes = sum(3 * p.to_local().nbytes for p in parts.model.parameters())  # type: ignore[attr-defined]
    # touch the moments, so that their pages exist before
    for parameter in parts.model.parameters():
        for value in parts.optimizer.state[parameter].values():
            value.add_(1)
    before = anonymous_memory_bytes()
    manager.load(layout.inspect(run_dir / "global_step_2"))
    return state_bytes, anonymous_memory_bytes() - before


def test_loading_maps_the_files_and_keeps_nothing_of_them(tmp_path):
    """16 MiB of parameters on 2 ranks, loaded by 3: no rank holds more than its own part
    afterwards.
    """
    (tmp_path / "model").mkdir()
    source = write_model_config(tmp_path / "model", vocab_size=65536)
    (tmp_path / "run").mkdir()
    run_ranks(run, 2, tmp_path / "run", source, Recipe(total_steps=2))
    for state_bytes, extra_bytes in run_ranks(memory_of_loading, 3, tmp_path / "run", source):
        assert state_bytes > 15 * MIB and extra_bytes < 4 * MIB
