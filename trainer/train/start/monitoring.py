"""Build the parts that watch a run: trackers, meter and guard."""

import math
import os
import platform
from math import inf

import torch
import transformers
from transformers import PreTrainedModel

from trainer import __version__ as trainer_version
from trainer.model import flops
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.tracking import Tracking
from trainer.train.clock import TraceFile
from trainer.train.detection.detector import MAX_FIRST_LOSS
from trainer.train.guard import Guard
from trainer.train.meter import Meter
from trainer.train.start.setup import RunSetup

LINES_PER_EPOCH = 50
"""Maximum number of console lines per epoch if `trainer.log_every` is null."""


def make_tracking(setup: RunSetup) -> Tracking:
    """Return the trackers of the run. Only the main rank has them."""
    trainer = setup.config.trainer
    epoch_steps = min(setup.schedule.steps_per_epoch, setup.total_steps)
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        setup.config.resolved,
        run_dir=setup.run_dir,
        total_steps=setup.total_steps,
        log_every=trainer.log_every or math.ceil(epoch_steps / LINES_PER_EPOCH),
    )


def environment(world: World) -> dict[str, str]:
    """Return facts about the machine and software versions, for `run.json` and the report."""
    return {
        "ranks": f"{world.size} on {distributed.device_name(world.device)}",
        "CPU cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fsdp-sft": trainer_version,
    }


def make_meter(setup: RunSetup, model: PreTrainedModel, tracking: Tracking | None) -> Meter:
    """Return the meter of the run. `data_facts` appear in its first row, then every 50 steps."""
    trainer = setup.config.trainer
    inputs = setup.inputs
    world = setup.world
    rows = inputs.train.summary
    facts = {
        "data/truncated": rows.num_truncated,
        "data/truncated_frac": rows.num_truncated / rows.num_kept_rows,
        "data/dropped": rows.num_dropped + rows.num_bad_rows,
    }
    return Meter(
        world,
        total_steps=setup.total_steps,
        cost=flops.step_flops(model),
        past_s=0.0 if tracking is None else tracking.past.duration_s,
        data_facts=facts,
        trace=TraceFile(setup.run_dir, rank=world.rank) if trainer.trace else None,
    )


def make_guard(setup: RunSetup, tracking: Tracking | None) -> Guard:
    """Return the guard, with the rollbacks that the run has already made.

    It accepts a high first loss if the model starts from random weights.
    """
    guard = Guard(
        setup.config.trainer,
        max_first_loss=inf if setup.inputs.source.random_weights else MAX_FIRST_LOSS,
        tell=None if tracking is None else tracking.event,
        validation=setup.start.fingerprints["validation"],
    )
    guard.rollbacks = setup.start.rollbacks
    return guard
