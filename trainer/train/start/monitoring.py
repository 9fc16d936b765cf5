"""Build the parts that watch a run: trackers, meter and guard."""

import itertools
import os
import platform
from dataclasses import replace
from math import inf

import torch
import transformers
from transformers import PreTrainedModel

from trainer import __version__ as trainer_version
from trainer.data.show import source_facts
from trainer.model import flops
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.tracking import Tracking
from trainer.train.clock import TraceFile
from trainer.train.detection.detector import MAX_FIRST_LOSS
from trainer.train.guard import Guard
from trainer.train.meter import Meter, Plan
from trainer.train.start.setup import RunSetup

LINES_PER_EPOCH = 50
"""Most lines of an epoch on the console if `trainer.log_every` is null."""


def make_tracking(setup: RunSetup) -> Tracking:
    """Return the trackers of the run. Only the main rank has them."""
    trainer = setup.config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        setup.config.resolved,
        run_dir=setup.run_dir,
        total_steps=setup.total_steps,
        log_every=trainer.log_every or _log_every(setup),
    )


def environment(world: World) -> dict[str, str]:
    """Return machine and versions, by name, for `run.json` and the report."""
    return {
        "ranks": f"{world.size} on {distributed.device_name(world.device)}",
        "CPU cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fsdp-sft": trainer_version,
    }


def _log_every(setup: RunSetup) -> int:
    """Return a round number of steps, so that an epoch gets at most `LINES_PER_EPOCH` lines."""
    num_steps = min(setup.schedule.steps_per_epoch, setup.total_steps)
    powers = (10**exponent for exponent in itertools.count())
    candidates = (digit * power for power in powers for digit in (1, 2, 5))
    return next(every for every in candidates if every * LINES_PER_EPOCH >= num_steps)


def make_meter(setup: RunSetup, model: PreTrainedModel, tracking: Tracking | None) -> Meter:
    """Return the meter of the steps, with the facts about the data that every row repeats."""
    trainer, inputs, world = setup.config.trainer, setup.inputs, setup.world
    total = inputs.train.total
    facts = {
        "data/truncated": total("num_truncated"),
        "data/truncated_frac": total("num_truncated") / max(1, total("num_kept_rows")),
        "data/dropped": total("num_dropped") + total("num_bad_rows"),
        **source_facts(inputs.train, setup.schedule, total_steps=setup.total_steps),
    }
    plan = Plan(
        total_steps=setup.total_steps,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        max_norm=setup.config.optim.clip_grad,
        data_facts=facts,
    )
    if tracking is not None:
        plan = replace(plan, past_s=tracking.past.duration_s)
    trace = TraceFile(setup.run_dir, rank=world.rank) if trainer.trace else None
    return Meter(world, plan=plan, cost=flops.step_flops(model), trace=trace)


def make_guard(setup: RunSetup, tracking: Tracking | None) -> Guard:
    """Return the guard. It knows the rollbacks so far, and that random weights start with a high
    loss.
    """
    guard = Guard(
        setup.config.trainer,
        max_first_loss=inf if setup.inputs.source.random_weights else MAX_FIRST_LOSS,
        tell=None if tracking is None else tracking.event,
    )
    guard.note_rollbacks(setup.start.rollbacks)
    return guard
