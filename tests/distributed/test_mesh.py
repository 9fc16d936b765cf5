"""Ranks are processes, data ranks train different samples: another dimension of the mesh changes no number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toy import write_model_config
from toy_runs import Recipe, Result, read_trace, run

from trainer.errors import EXIT_DONE
from trainer.runtime.distributed import World, make_world, mesh_dimensions
from trainer.runtime.seeding import seed_step

MEASURED = (
    "time/",
    "train/time(s)",
    "throughput/",
    "memory/",
    "system/",
    "obs/",
    "progress/e",
    "progress/goodput",
    "ckpt/save_s",
)
"""What differs from run to run."""
_OF_ONE_SAVE = ("nonce", "created_utc", "manifest_sha256", "grad_norm")


def train(world: World, run_dir: Path, source: Any, dimensions: dict[str, int], total_steps: int = 4) -> Result:
    world = make_world(world.device, dimensions)
    seed_step(3, step=1, data_rank=world.data_rank)
    numbers = torch.rand(3).tolist()
    result = run(world, run_dir, source, Recipe(total_steps=total_steps, has_trace=True), max_samples=2)
    assert len(set(map(tuple, gathered(world, numbers)))) == world.num_data_ranks, "one sequence for each data rank"
    return result


def gathered(world: World, value: Any) -> list[Any]:
    values: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(values, value)
    return values


def checkpoint(run_dir: Path) -> dict[str, Any]:
    """Names of files, of which the contents hold neither times nor random names, and what the manifest says."""
    (directory,) = run_dir.glob("global_step_4")
    manifest = json.loads((directory / "manifest.json").read_text())
    entries = {entry["path"]: entry for entry in manifest.pop("files")}
    return {
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*")),
        "sizes": {path: entry["size_bytes"] for path, entry in entries.items()},
        "weights": {path: entry["sha256"] for path, entry in entries.items() if path.endswith(".safetensors")},
        **{key: value for key, value in manifest.items() if key not in _OF_ONE_SAVE},
    }


@pytest.mark.parametrize("num_data_ranks", [1, 2])
def test_a_dimension_that_does_not_multiply_the_data_changes_no_number(tmp_path: Path, num_data_ranks: int) -> None:
    """Data order, losses, norms, metrics, parameters and checkpoint of twice as many ranks, in pairs of equal ones.

    Two numbers are added in one order only; four norms in another than two: to the last digit of float64.
    """
    source = write_model_config(tmp_path / "model")
    plain, *_ = run_ranks(train, num_data_ranks, tmp_path / "plain", source, {"fsdp": num_data_ranks})
    pairs = {"fsdp": num_data_ranks, "pair": 2}
    paired, *others = run_ranks(train, 2 * num_data_ranks, tmp_path / "paired", source, pairs)
    assert len(plain.losses) == 4 and all(other.losses == paired.losses for other in others)
    for (step, row), (_, expected) in zip(paired.rows, plain.rows, strict=True):
        found = {key: value for key, value in row.items() if not key.startswith(MEASURED)}
        assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-14), step
        assert row.keys() == expected.keys()
    assert checkpoint(tmp_path / "paired") == checkpoint(tmp_path / "plain")
    if num_data_ranks == 1:
        assert read_trace(tmp_path / "paired") == read_trace(tmp_path / "plain")
        again, *_ = run_ranks(train, 1, tmp_path / "paired", source, {"fsdp": 1}, total_steps=6)
        straight, *_ = run_ranks(train, 2, tmp_path / "plain", source, pairs, total_steps=6)
        assert again.exit_code == straight.exit_code == EXIT_DONE
        assert again.losses == straight.losses and sorted(again.losses) == [5, 6], "either continues the other's"


def described(world: World) -> dict[str, Any]:
    world = make_world(world.device, {"ddp": 2, "fsdp": 1, "pair": 2})
    names = ("rank", "data_rank", "is_data_leader", "num_data_ranks", "num_shards", "num_replicas")
    return {**{name: getattr(world, name) for name in names}, "names": world.data_mesh.mesh_dim_names}


def test_ranks_of_a_pair_are_one_data_rank() -> None:
    alike = {"num_data_ranks": 2, "num_shards": 1, "num_replicas": 4, "names": ("ddp", "fsdp")}
    assert run_ranks(described, 4) == [
        {"rank": rank, "data_rank": rank // 2, "is_data_leader": rank % 2 == 0, **alike} for rank in range(4)
    ]


def test_copies_of_sharded_parameters_are_a_dimension_of_their_own() -> None:
    assert mesh_dimensions(4, fsdp_size=-1) == mesh_dimensions(4, fsdp_size=4) == {"fsdp": 4}
    assert mesh_dimensions(4, fsdp_size=2) == {"ddp": 2, "fsdp": 2}
