"""Run directories as a finished run of two ranks leaves them: metrics and the last checkpoint,
with real shards.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_fakes import WORLD_SIZE, manifest_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.shards import write_torch
from trainer.tracking.metrics_file import FILE_NAME, MetricsFile, MetricsRow

STEPS = 6
NAMES = ("embed.weight", "norm.weight")


def row(step: int) -> dict[str, float]:
    """Return a row with the compared metrics and one that differs between runs."""
    values = {"train/loss": 1 / step, "train/grad_norm": 0.1 * step, "train/lr(1e-3)": 1e-3 / 3}
    return {**values, "train/total_token_count": 100 + step, "train/time(s)": float(torch.rand(()))}


def rank_state(rank: int) -> dict[str, dict[str, Any]]:
    """Contents of a rank's model and optimizer files."""
    generator = torch.Generator().manual_seed(rank)

    def sharded(*shape: int) -> Tensor:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        return distribute_tensor(torch.randn(*shape, generator=generator), mesh, [Shard(0)])

    model = {name: sharded(4, 3) for name in NAMES} | {"empty": sharded(0, 3)}
    moments = {
        name: {"step": torch.tensor(float(STEPS)), "exp_avg": sharded(4, 3)} for name in NAMES
    }
    groups = [{"lr": 0.1, "betas": [0.9, 0.95], "foreach": None, "param_names": list(NAMES)}]
    return {"model": model, "optim": {"state": moments, "param_groups": groups}}


def rank_states() -> list[dict[str, dict[str, Any]]]:
    """Contents of the model and optimizer files of every rank."""
    # of this process alone, for the mesh that a sharded tensor needs
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states = [rank_state(rank) for rank in range(WORLD_SIZE)]
    dist.destroy_process_group()
    return states


def data_state(loader_counter: int) -> dict[str, Any]:
    return {
        "step": STEPS,
        "epoch": 0,
        "samples_consumed": 48,
        "seed": 1,
        "loader": {"yielded": loader_counter},
    }


def write_run(run_dir: Path) -> Path:
    """A complete run, equal to every other one; only the loader's own counter is its own."""
    run_dir.mkdir()
    metrics = MetricsFile(run_dir / FILE_NAME)
    for step in range(1, STEPS + 1):
        metrics.write(MetricsRow.of(row(step), step))
    metrics.write(
        MetricsRow.of({"val/loss": 0.25, "time/eval/total_s": float(torch.rand(()))}, STEPS)
    )
    metrics.close()
    write_checkpoint(run_dir, rank_states(), data_state(int(torch.randint(1000, ()))))
    return run_dir


def write_checkpoint(
    run_dir: Path, states: list[dict[str, dict[str, Any]]], data: dict[str, Any]
) -> None:
    step_dir = run_dir / layout.step_dir_name(STEPS)
    step_dir.mkdir()
    files = {layout.DATA: data}
    for rank, state in enumerate(states):
        files[layout.model_file(len(states), rank)] = state["model"]
        files[layout.optim_file(len(states), rank)] = state["optim"]
    records = tuple(
        write_torch(step_dir / name, value, root=step_dir) for name, value in files.items()
    )
    manifest = dataclasses.replace(manifest_of(STEPS, records), world_size=len(states))
    fsio.write_file(step_dir / MANIFEST, manifest.to_json().encode(), root=step_dir)
    layout.publish(run_dir, STEPS)


def rewrite_checkpoint(
    run_dir: Path, states: list[dict[str, dict[str, Any]]], data: dict[str, Any]
) -> None:
    """Another final state under a manifest that proves it: what a resume that goes wrong would
    save.
    """
    fsio.remove_tree(run_dir / layout.step_dir_name(STEPS))
    write_checkpoint(run_dir, states, data)
