"""The parts that watch a run, made from its configuration; among them the report's checklist while it goes on: what
fails at step 100 and at each save is said, once (floor 4).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

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
from trainer.tracking import Tracking, events_file
from trainer.tracking.backend import Backend
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo


def make_tracking(config: Config, *, total_steps: int) -> Tracking:
    trainer = config.trainer
    tracking = Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        config.resolved,
        run_dir=Path(trainer.default_local_dir),
        total_steps=total_steps,
        group=trainer.run_group,
    )
    tracking.attach("checklist", partial(ChecklistBackend, tell=tracking.event))
    return tracking


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
        data_facts=_data_facts(inputs) | source_facts(inputs.train, schedule, total_steps=total_steps),
        has_aliases=trainer.roll_detail != "off",
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


def make_guard(config: TrainerConfig, inputs: Inputs, *, rollbacks: Rollbacks, tracking: Tracking | None) -> Guard:
    max_first_loss = inf if inputs.source.random_weights else MAX_FIRST_LOSS
    guard = Guard(config, max_first_loss=max_first_loss, tell=None if tracking is None else tracking.event)
    guard.note_rollbacks(rollbacks)
    return guard


if TYPE_CHECKING:
    from trainer.report.judge import Standing

KIND = "checklist"
FIRST_STEPS = 100
SETTLE_S = 1.0


class ChecklistBackend(Backend):
    """In a thread of rank 0, from rows already written: training neither waits for it nor is changed by it.

    A line that fails is told again only when it has been in order in between, over restarts too.
    """

    def __init__(self, info: RunInfo, tell: Callable[..., None]) -> None:
        self._info, self._tell = info, tell
        self._failing: set[str] = set()
        self._owes_start = False

    def open(self) -> None:
        for event in events_file.read_events(self._info.run_dir / events_file.FILE_NAME):
            if event["kind"] == KIND:
                (self._failing.add if event["level"] == "warn" else self._failing.discard)(event["line"])
        self._owes_start = self._info.resume_step < FIRST_STEPS

    def log(self, row: MetricsRow) -> None:
        if self._owes_start and row.kind == "train" and row.step >= FIRST_STEPS:
            self._owes_start = False
            self._say("start", row.step)
        if "ckpt/save_s" in row.data:
            self._say("checkpoint", row.step - int(row.data.get("ckpt/age_steps", 0)))

    @cached_property
    def _standing(self) -> "Standing":
        """Imported when a run comes so far: its start is not to wait for the rules."""
        from trainer.report.judge import Standing

        return Standing(self._info.metrics_path)

    def rewind(self, step: int) -> None:
        """`metrics.jsonl` says it."""

    def close(self, exit_code: int) -> None:
        """Nothing is open."""

    def _say(self, phase: str, step: int) -> None:
        lines = self._standing.lines(phase)
        if any(line.status == "fail" and line.id not in self._failing for line in lines):
            time.sleep(SETTLE_S)  # a save or a rotation may have been under way: what fails does so twice
            was_failing = {line.id for line in lines if line.status == "fail"}
            lines = tuple(
                line for line in self._standing.lines(phase) if line.status != "fail" or line.id in was_failing
            )
        for line in lines:
            if line.status == "fail" and line.id not in self._failing:
                self._failing.add(line.id)
                self._tell(KIND, step, f"checklist: {line.detail} {line.remedy}".rstrip(), "warn", line=line.id)
            elif line.status == "pass" and line.id in self._failing:
                self._failing.discard(line.id)
                self._tell(KIND, step, f"checklist: in order again: {line.text} ({line.detail})", line=line.id)
