"""The parts that watch a run, made from its configuration (floor 4)."""

from dataclasses import replace
from math import inf
from pathlib import Path

from transformers import PreTrainedModel

from trainer.config import Config, TrainerConfig
from trainer.data.announce import source_facts
from trainer.data.batch_plan import Schedule
from trainer.detection.detector import MAX_FIRST_LOSS
from trainer.guard.guard import Guard
from trainer.model import flops
from trainer.monitor.clock import TraceFile
from trainer.monitor.memory import Memory
from trainer.monitor.meter import Meter, Plan
from trainer.progress import Rollbacks
from trainer.run.inputs import Inputs
from trainer.runtime.distributed import World
from trainer.tracking import Tracking


def make_tracking(config: Config, *, total_steps: int) -> Tracking:
    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        config.resolved,
        run_dir=Path(trainer.default_local_dir),
        total_steps=total_steps,
    )


def make_meter(
    config: Config,
    inputs: Inputs,
    model: PreTrainedModel,
    memory: Memory,
    *,
    world: World,
    schedule: Schedule,
    total_steps: int,
    tracking: Tracking | None,
) -> Meter:
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    plan = Plan(
        total_steps=total_steps,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        max_norm=config.optim.clip_grad,
        run_dir=run_dir,
        data_facts=_data_facts(inputs)
        | source_facts(inputs.train, schedule, total_steps=total_steps),
    )
    if tracking is not None:
        past = tracking.past
        plan = replace(
            plan,
            attempt=tracking.attempt,
            past_s=past.duration_s,
            num_lost_steps=past.num_lost_steps,
            tracker_health=tracking.health,
        )
    observe = TraceFile(run_dir, rank=world.rank).span if trainer.trace else None
    return Meter(world, plan=plan, cost=flops.step_flops(model), memory=memory, observe=observe)


def _data_facts(inputs: Inputs) -> dict[str, float]:
    total = inputs.train.total
    return {
        "data/truncated": total("num_truncated"),
        "data/truncated_frac": total("num_truncated") / max(1, total("num_kept_rows")),
        "data/dropped": total("num_dropped") + total("num_bad_rows"),
    }


def make_guard(
    config: TrainerConfig, inputs: Inputs, *, rollbacks: Rollbacks, tracking: Tracking | None
) -> Guard:
    max_first_loss = inf if inputs.source.random_weights else MAX_FIRST_LOSS
    guard = Guard(
        config, max_first_loss=max_first_loss, tell=None if tracking is None else tracking.event
    )
    guard.note_rollbacks(rollbacks)
    return guard
