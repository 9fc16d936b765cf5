"""The parts that watch a run, made from its configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from trainer.checkpoint.rollback import Rollbacks
from trainer.config import TrainerConfig
from trainer.data.facts import length_facts
from trainer.guard.evidence import EvidenceKeeper
from trainer.guard.guard import Guard, GuardSettings
from trainer.guard.user_rules import parse_rules
from trainer.monitor.memory import Memory
from trainer.monitor.meter import Meter, Plan
from trainer.monitor.roll_detail import RollDetail
from trainer.monitor.trace import TraceFile
from trainer.monitor.validation import Validation
from trainer.protocols import StepCost
from trainer.run.inputs import Inputs
from trainer.runtime.distributed import World
from trainer.tracking import Tracking

MAX_FIRST_LOSS = 5.0
"""Of pretrained weights, in nats per token."""


@dataclass(frozen=True)
class Monitoring:
    meter: Meter
    guard: Guard
    evidence: EvidenceKeeper
    detail: RollDetail
    new_validation: Callable[[], Validation]


def build_monitoring(
    config: TrainerConfig,
    inputs: Inputs,
    *,
    world: World,
    cost: StepCost | None,
    total_steps: int,
    max_norm: float,
    rollbacks: Rollbacks,
    tracking: Tracking | None,
) -> Monitoring:
    run_dir, memory = Path(config.default_local_dir), Memory(world.device)
    plan = Plan(
        total_steps=total_steps,
        save_freq=config.save_freq,
        test_freq=config.test_freq,
        max_norm=max_norm,
        run_dir=run_dir,
        data_facts=_data_facts(inputs),
        has_roll_names=config.roll_detail != "off",
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
    guard = Guard(_guard_settings(config, inputs), events=tracking)
    guard.note_rollbacks(rollbacks)
    observe = TraceFile(run_dir, rank=world.rank).span if config.trace else None
    held_out = inputs.validation
    facts = length_facts(held_out.lengths, held_out.num_loss_tokens) if held_out is not None else {}
    return Monitoring(
        meter=Meter(world, plan=plan, cost=cost, memory=memory, observe=observe),
        guard=guard,
        evidence=EvidenceKeeper(run_dir, world=world, location=inputs.train.location, seed=config.seed),
        detail=RollDetail(memory, level=config.roll_detail),
        new_validation=partial(Validation, world, length_facts=facts),
    )


def _data_facts(inputs: Inputs) -> dict[str, float]:
    summary = inputs.train.dataset.summary
    return {
        "data/truncated": summary.num_truncated,
        "data/truncated_frac": summary.num_truncated / max(1, summary.num_samples),
        "data/dropped": summary.num_dropped + summary.num_bad_rows,
    }


def _guard_settings(config: TrainerConfig, inputs: Inputs) -> GuardSettings:
    return GuardSettings(
        max_nonfinite_steps=config.max_nonfinite_steps,
        on_nonfinite=config.guard.on_nonfinite,
        on_severe=config.guard.on_severe,
        on_diverging=config.guard.on_diverging,
        rules=parse_rules(config.guard.rules),
        early_stop_patience=config.early_stop_patience,
        early_stop_min_delta=config.early_stop_min_delta,
        max_first_loss=inf if inputs.source.random_weights else MAX_FIRST_LOSS,
    )
