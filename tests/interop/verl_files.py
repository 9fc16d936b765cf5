"""Files as verl 0.9.1 writes them, made without verl, and what a resume does with such files.

The writer does what `FSDPCheckpointManager` and `CheckpointHandler` do; test_verl_checkpoint.py compares it with them.
"""

import json
import os
import pickle
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from interop import verl_run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toy import build_toy_model, optim_config

from trainer.checkpoint import layout, verl
from trainer.checkpoint.state import ModelShards, OptimizerShards, load_state
from trainer.optim import OPTIMIZERS
from trainer.progress import Position

EXPECTED = "expected.safetensors"
NAMES = ["embed.weight", "norm.weight"]


def run_in_verl(script: str, *arguments: str) -> None:
    """Run a script of this directory with the interpreter that has verl; fails with what it printed last."""
    directory = Path(__file__).parent
    result = subprocess.run(
        [os.environ["VERL_PYTHON"], str(directory / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(directory), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]


def write_run(world: Any, run_dir: Path, config_dir: Path, settings: verl_run.Settings, *, device: str = "cpu") -> None:
    """Train on this rank and save as verl does; the last step's whole tensors go to `EXPECTED`. Collective."""
    model = verl_run.build_model(config_dir, settings.seed)
    is_tied = model.config.tie_word_embeddings
    for name, module in model.named_modules():
        is_outer = isinstance(module, nn.Embedding) or name.endswith("lm_head")
        if type(module).__name__ in model._no_split_modules or (is_outer and not is_tied):
            fully_shard(module, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=verl_run.PEAK_LR, weight_decay=0.01, betas=(0.9, 0.999))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))

    def save(step: int, loader: Any) -> None:
        directory = run_dir / f"global_step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        with _stored_on(device):
            _save(world, directory, model, optimizer, scheduler)
        torch.save(loader.state_dict(), directory / f"data_{world.rank}.pt")
        if world.is_main:
            (run_dir / "latest_checkpointed_iteration.txt").write_text(str(step))

    run_dir.mkdir(exist_ok=True)
    verl_run.train(model, optimizer, scheduler, settings, save=save, expected=run_dir / EXPECTED)


def _save(world: Any, directory: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    suffix = f"world_size_{world.size}_rank_{world.rank}.pt"
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    torch.save(model.state_dict(), directory / f"model_{suffix}")
    torch.save(optimizer.state_dict(), directory / f"optim_{suffix}")
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": rng}, directory / f"extra_state_{suffix}")
    if world.is_main:
        config = {"FSDP_version": 2, "world_size": world.size}
        (directory / "fsdp_config.json").write_text(json.dumps(config, indent=4))


class _CudaPickler(pickle.Pickler):
    """Says of every tensor that it is on the first GPU."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.device, ("cuda", 0)) if isinstance(value, torch.device) else NotImplemented


@contextmanager
def _stored_on(device: str) -> Iterator[None]:
    """Make `torch.save` write what it writes of tensors on `device`, on a machine without one."""
    if device == "cpu":
        yield
        return
    save, pickle_module = torch.save, ModuleType("cuda_pickle")
    pickle_module.Pickler = _CudaPickler  # type: ignore[attr-defined]
    with (
        mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"),
        mock.patch("torch.save", lambda value, path: save(value, path, pickle_module=pickle_module)),
    ):
        yield


def expected_tensors(run_dir: Path) -> dict[str, Tensor]:
    """Whole parameters by name, and moments as `<name>.exp_avg` and `<name>.exp_avg_sq`."""
    return load_file(run_dir / EXPECTED)


def load_checkpoint(world: Any, path: Path, source: Any) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """Resume on this rank: (whole tensors as `expected_tensors` names them, step by parameter, position)."""
    checkpoint = layout.inspect(path).verl
    assert verl.damaged_files(checkpoint) == []
    verl.require_safe(checkpoint)
    model = build_toy_model(world, source)
    optimizer = OPTIMIZERS["adamw"](model, optim_config())
    state = {"model": ModelShards(model), "optimizer": OptimizerShards(model, optimizer)}
    load_state(layout.inspect(path), state, contents=("model", "optimizer"), world=world)
    whole, steps = {}, {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        whole[name], steps[name] = parameter.detach().full_tensor(), float(moments["step"])
        whole |= {f"{name}.{key}": moments[key].full_tensor() for key in ("exp_avg", "exp_avg_sq")}
    settings = verl_run.Settings(())
    sizes = {"num_samples": settings.num_samples, "train_batch_size": settings.batch_size}
    return whole, steps, verl.read_position(checkpoint, **sizes)


def shape_of(value: Any) -> Any:
    """What a loaded file is made of: keys in order, types, dtypes, shapes and placements, but no values."""
    if isinstance(value, dict):
        return [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [shape_of(item) for item in value[:40]]
    if isinstance(value, DTensor):
        return "DTensor", value.dtype, value.shape, value._local_tensor.shape, value.placements, value.requires_grad
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__, value.dtype, value.shape
    return type(value).__name__


def moments(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}


def optimizer_state() -> dict[str, Any]:
    return {
        "state": {0: moments((8, 4)), 1: moments((4,))},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
    }


def extra_state(step: int) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW([parameter]), lambda step: 1.0)
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    return {"lr_scheduler": {**schedule.state_dict(), "last_epoch": step}, "rng": rng}


def loader_state(settings: verl_run.Settings, *, rank: int = 0) -> dict[str, Any]:
    """What verl's loader says after the last of `save_steps`."""
    loader, sampler = verl_run.build_loader(settings, rank=rank, world_size=2)
    for step, _ in verl_run.steps(loader, sampler, settings):
        if step == settings.save_steps[-1]:
            break
    state: dict[str, Any] = loader.state_dict()
    return state


def write_directory(run_dir: Path, *, step: int = 3, world_size: int = 2, data: dict[str, Any] | None = None) -> Path:
    """A directory with verl's names; tensors are whole, as only their names and shapes matter here."""
    path = run_dir / f"global_step_{step}"
    path.mkdir()
    for rank in range(world_size):
        suffix = f"world_size_{world_size}_rank_{rank}.pt"
        model = {NAMES[0]: torch.ones(8, 4), NAMES[1]: torch.ones(4), "head.weight": torch.ones(8, 4)}
        torch.save(model, path / f"model_{suffix}")
        torch.save(optimizer_state(), path / f"optim_{suffix}")
        torch.save(extra_state(step), path / f"extra_state_{suffix}")
    if data is None:
        data = {f"data_{rank}.pt": loader_state(verl_run.Settings((step,)), rank=rank) for rank in range(world_size)}
    for name, state in data.items():
        torch.save(state, path / name)
    (path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    return path


def position(path: Path, *, num_samples: int = 22, train_batch_size: int = 4) -> Position:
    checkpoint = layout.inspect(path).verl
    return verl.read_position(checkpoint, num_samples=num_samples, train_batch_size=train_batch_size)
