"""Whole runs of the toy model on ranks: start, resume, train, save, with the project's own
parts and a trace.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from toy import (
    Recorder,
    ToySamples,
    build_toy_model,
    full_parameters,
    toy_run,
    whole,
    write_model_config,
)

from trainer.checkpoint import finished, layout
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.model_files import ModelFiles
from trainer.checkpoint.save import Saver
from trainer.checkpoint.start import choose, decide_start
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.model.pretrained import whole_checkpoint
from trainer.optim.clip import local_square_sum
from trainer.runtime.progress import History
from trainer.runtime.signals import StopRequest
from trainer.train import step
from trainer.train.fit import fit

CONTENTS = ["model", "optimizer", "extra", "hf_model"]
BATCH_SIZE = 8
TOLD = []
"""The results of this rank's saves: kind, step, message."""
TRACE = "trace.jsonl"
TRACED = ("train/loss", "train/grad_norm", "train/lr(1e-3)")


@dataclass(frozen=True)
class Recipe:
    """The settings of a toy run. `seed` determines the samples."""

    total_steps: int = 6
    save_freq: int = 2
    keep: int | None = None
    seed: int = 0
    batch_size: int = BATCH_SIZE
    async_save: bool = False
    save_timeout_s: int = 30
    resume_allow: tuple[str, ...] = ()
    has_trace: bool = False
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of `trainer.checkpoint`."""


@dataclass(frozen=True)
class Result:
    """`losses`: (loss, norm) by step; `parameters`: whole tensors."""

    losses: dict[int, tuple[float, float]]
    parameters: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    start_step: int
    exit_code: int
    rows: list[tuple[int, dict[str, float]]]


class StopsAfter(StopRequest):
    """Requests a stop in the step with this number. Each step checks once."""

    def __init__(self, num_steps):
        super().__init__()
        self._num_left = num_steps

    @property
    def is_set(self):
        self._num_left -= 1
        return self._num_left <= 0


def odd_model(directory):
    """A model with rows that no number of ranks divides, a vector shorter than the largest number
    of ranks, and a tied head.
    """
    return write_model_config(directory, vocab_size=163, intermediate_size=97)


@pytest.fixture(scope="module")
def source(root):
    return odd_model(root / "model")


def trainer_config(run_dir, recipe):
    return TrainerConfig(
        project_name="toy",
        experiment_name="toy",
        default_local_dir=str(run_dir),
        logger=[],
        total_training_steps=recipe.total_steps,
        save_freq=recipe.save_freq,
        test_freq=-1,
        max_ckpt_to_keep=recipe.keep,
        resume_allow=list(recipe.resume_allow),
        seed=3,
        device="cpu",
        hang_timeout_s=20,
        checkpoint=CheckpointConfig(
            **{
                "save_contents": CONTENTS,
                "export_dtype": "float32",
                "async_save": recipe.async_save,
                **recipe.checkpoint,
            }
        ),
    )


def tell(kind, step, message, level):
    TOLD.append((kind, step, message))


def checkpoint_manager(
    world,
    run_dir,
    source,
    parts,
    recipe,
    *,
    lock=None,
    **settings,
):
    whole = None if source.random_weights else whole_checkpoint(source)
    saver = Saver(
        run_dir,
        parts.model,
        world=world,
        config=trainer_config(run_dir, recipe).checkpoint,
        source=ExportSource(ModelFiles.read(Path(source.path)), None, (3,), whole),
        keep=recipe.keep,
        lock=lock,
        fingerprints=fingerprints(recipe),
        timeout_s=recipe.save_timeout_s,
    )
    return CheckpointManager(saver, state=parts.stateful_parts(), tell=tell, **settings)


def save_now(manager, parts, *, is_required=True):
    """Save as the training loop does."""
    manager.save(
        parts.batches.position, loss=1.0, grad_norm=1.0, history=History(), is_required=is_required
    )


def fingerprints(recipe):
    return {
        "data": f"toy {recipe.seed}",
        "train_batch_size": str(recipe.batch_size),
        "model_config": "toy",
    }


def begin(config, fingerprints, world, *, total_steps):
    """Decide where a run begins, as `trainer.train.start.main` does."""
    selection = choose(config, world)
    return decide_start(config, fingerprints, world, selection=selection, total_steps=total_steps)


def run(
    world,
    run_dir,
    source,
    recipe,
    *,
    stop=None,
    **changes,
):
    """Train from the current state of `run_dir` to the end of the recipe."""
    samples = changes.pop("samples", None) or ToySamples(seed=recipe.seed)
    config = trainer_config(run_dir, recipe)
    start = begin(config, fingerprints(recipe), world, total_steps=recipe.total_steps)
    model = build_toy_model(
        world, source, loss=changes.pop("loss", "cross_entropy"), **changes.pop("model", {})
    )
    gradient_sum = changes.pop("local_square_sum", local_square_sum)
    parts = toy_run(
        world,
        model,
        samples,
        total_steps=recipe.total_steps,
        batch_size=recipe.batch_size,
        start=start.position,
        skipped_steps=start.rollbacks.skipped_steps,
        **{
            "save_freq": recipe.save_freq,
            "stop": stop or StopRequest(),
            **changes,
        },
    )
    parts.guard.rollbacks = start.rollbacks
    checkpoints = checkpoint_manager(world, run_dir, source, parts, recipe, lock=start.lock)
    if start.checkpoint is not None:
        checkpoints.load(start.checkpoint)
        checkpoints.settle(start.checkpoint.step, parts.guard.history)
    recorder = Tracer(run_dir / TRACE, parts) if recipe.has_trace and world.is_main else Recorder()
    parts.checkpoints, parts.tracking = checkpoints, recorder
    with patch.object(step, "local_square_sum", gradient_sum):
        code = 0 if start.is_complete else fit(parts)
    if start.lock is not None:
        if code == 0:
            last = run_dir / layout.step_dir_name(parts.batches.step)
            finished.write(last, finished.Finished(ended_early=False, message=""))
        start.lock.release()
    losses = {
        step: (row["train/loss"], row["train/grad_norm"])
        for step, row in recorder.rows
        if "train/loss" in row
    }
    return Result(
        losses=losses,
        parameters=full_parameters(model),
        moments=moments_of(parts),
        start_step=start.position.step,
        exit_code=code,
        rows=recorder.rows,
    )


def begun(run_dir, target, step):
    """Copy the checkpoints as they were after this step to `target`, without later ones."""
    for info in layout.checkpoints(run_dir):
        if info.step <= step:
            shutil.copytree(info.path, target / info.path.name)
    (target / layout.POINTER).write_text(str(step))
    return target


def moments_of(parts):
    """{name.key: whole tensor}, collective."""
    return {
        f"{name}.{key}": whole(value)
        for name, parameter in parts.model.named_parameters()
        for key, value in parts.optimizer.state[parameter].items()
    }


class Tracer(Recorder):
    """Appends a line per step to a file: exact loss, norm and rate, and a digest of this rank's
    state.
    """

    def __init__(self, path, parts):
        super().__init__()
        self._parts = parts
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(self, data, step, kind=None):
        super().log(data, step, kind)
        if "train/loss" not in data:
            return
        line = {"step": step, "state": self._digest()} | {key: data[key] for key in TRACED}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def _digest(self):
        digest = hashlib.sha256()
        for parameter in self._parts.model.parameters():
            for tensor in (parameter, *self._parts.optimizer.state[parameter].values()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                digest.update(local.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def read_trace(run_dir):
    """Return complete lines only, because a kill may tear the last one."""
    path = run_dir / TRACE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]
