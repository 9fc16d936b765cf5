"""The only file that knows all concrete parts: it makes them in order and hands them to the trainer (floor 4)."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from trainer.batch import StepBatch
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lineage import Lineage, describe_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import RunState
from trainer.checkpoint.start import RunShape, Start, decide_start
from trainer.config import Config
from trainer.data.announce import announce
from trainer.data.batch_plan import Limits, Schedule
from trainer.data.loader import RankPlan, TrainLoader, validation_batches
from trainer.errors import EXIT_DONE
from trainer.guard.user_rules import parse_rules
from trainer.model import flops
from trainer.model.assemble import build_model
from trainer.optim import OPTIMIZERS, clip
from trainer.optim.clip import Optimizer
from trainer.optim.schedule import Schedule as LrSchedule
from trainer.protocols import LoopState, Position
from trainer.run.end import Held, giving_back, unfinished
from trainer.run.inputs import Inputs, prepare_inputs
from trainer.run.monitoring import Monitoring, build_monitoring
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.environment import keep_freed_memory
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest
from trainer.sft_trainer import Cadence, Parts, SFTTrainer
from trainer.tracking import Tracking, metrics_file

logger = logging.getLogger(__name__)
DEFAULT_LR = {False: 1e-5, True: 2e-3}
"""`optim.lr=null`, for pretrained and for random weights."""


@dataclass(frozen=True)
class Setup:
    """What is known of a run once its ranks have met."""

    config: Config
    inputs: Inputs
    schedule: Schedule
    total_steps: int
    lineage: Lineage
    world: World
    start: Start

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir)


@dataclass(frozen=True)
class Live:
    """The parts that change while a run goes on."""

    model: PreTrainedModel
    optimizer: Optimizer
    train_batches: TrainLoader
    monitoring: Monitoring
    loop: LoopState
    tracking: Tracking | None
    schedule: LrSchedule


def run(config: Config, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """One run from its configuration to its exit code."""
    device = distributed.pick_device(config.trainer.device)
    if device.type == "cpu":
        keep_freed_memory()
    parse_rules(config.trainer.guard.rules)  # what is wrong with them is known before anything slow
    trainer = config.trainer
    heartbeat.enter("prepare", limit_s=trainer.dist_timeout_s)
    inputs = prepare_inputs(config, progress=heartbeat.beat)
    world = distributed.start(
        device, timeout_s=trainer.dist_timeout_s, fsdp_size=config.model.fsdp_config.fsdp_size, heartbeat=heartbeat
    )
    # from here to the first step no longer in silence than it takes to save, and to wait for each other
    heartbeat.enter("load", limit_s=trainer.dist_timeout_s + trainer.checkpoint.save_timeout_s)

    def schedule_from(position: Position) -> Schedule:
        return Schedule(len(inputs.train.lengths), config.data.train_batch_size, config.trainer.seed, position)

    def total_steps(position: Position) -> int:
        return trainer.total_training_steps or schedule_from(position).steps_until(trainer.total_epochs)

    def lacking_at_end(position: Position, loop: LoopState) -> list[str]:
        owes_validation = loop.owes_validation and inputs.validation is not None
        return unfinished(Path(config.trainer.default_local_dir), position.step, owes_validation=owes_validation)

    lineage = _lineage(config, inputs)
    shape = RunShape(len(inputs.train.lengths), config.data.train_batch_size, total_steps, lineage, lacking_at_end)
    start = decide_start(config.trainer, shape, world)
    schedule, num_steps = schedule_from(start.position), total_steps(start.position)
    setup = Setup(config, inputs, schedule, num_steps, lineage, world, start)
    exit_code = EXIT_DONE
    if start.is_complete:
        assert start.checkpoint is not None
        is_whole = start.position.step >= num_steps
        what = f"has all {num_steps} steps" if is_whole else f"ended the run early, at step {start.position.step}"
        logger.info(f"already complete: {start.checkpoint.path} {what}; nothing to do")
    else:
        exit_code = train(setup, stop, heartbeat)
    distributed.stop()
    return exit_code


def train(setup: Setup, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """Build, resume, fit, end; the exit code."""
    heartbeat.report_to(setup.run_dir, rank=setup.world.rank)
    held = Held(setup.run_dir, setup.world, setup.start.lock)
    with giving_back(held, stop, timeout_s=setup.config.trainer.dist_timeout_s):
        if setup.world.is_main:
            held.tracking = _tracking(setup)
        model = build_model(
            setup.config.model,
            setup.inputs.source,
            world=setup.world,
            seed=setup.config.trainer.seed,
            max_length=setup.config.data.max_length,
        )
        plan = _rank_plan(setup, model)
        state = _live(setup, model, plan, held.tracking)
        held.checkpoints = _checkpoints(setup, state)
        if setup.start.checkpoint is not None:
            _resume(setup, held.checkpoints, setup.start.checkpoint, held.tracking)
        held.checkpoints.require_space()  # after a resume has deleted what is no longer to be kept
        if setup.start.position.step < setup.total_steps:
            _announce(setup, plan, state.schedule)
        if held.tracking is not None:
            held.tracking.start(setup.start.position.step)
        held.exit_code = SFTTrainer(_parts(setup, state, held.checkpoints, plan), stop, heartbeat).fit()
    return held.exit_code


def _resume(setup: Setup, checkpoints: CheckpointManager, found: CheckpointInfo, tracking: Tracking | None) -> None:
    checkpoints.load(found)
    step = setup.start.position.step
    if step < setup.total_steps:
        logger.info("Found checkpoint: %s, continuing at step %d of %d", found.path, step + 1, setup.total_steps)
    is_own = found.manifest is not None and found.path.resolve().parent == setup.run_dir.resolve()
    if tracking is not None and is_own and tracking.past.last_step < step:
        logger.warning(
            "%s ends at step %d, the checkpoint is of step %d: histories and report lack the rows between them",
            setup.run_dir / metrics_file.FILE_NAME,
            tracking.past.last_step,
            step,
        )


def _tracking(setup: Setup) -> Tracking:
    trainer = setup.config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        setup.config.resolved,
        run_dir=setup.run_dir,
        total_steps=setup.total_steps,
    )


def _live(setup: Setup, model: PreTrainedModel, plan: RankPlan, tracking: Tracking | None) -> Live:
    return Live(
        model=model,
        optimizer=OPTIMIZERS[setup.config.optim.name](model, setup.config.optim),
        train_batches=_train_loader(setup, plan),
        monitoring=build_monitoring(
            setup.config.trainer,
            setup.inputs,
            world=setup.world,
            cost=flops.step_flops(model),
            total_steps=setup.total_steps,
            max_norm=setup.config.optim.clip_grad,
            rollbacks=setup.start.rollbacks,
            tracking=tracking,
        ),
        loop=LoopState(),
        tracking=tracking,
        schedule=_lr_schedule(setup),
    )


def _announce(setup: Setup, plan: RankPlan, lr: LrSchedule) -> None:
    announce(
        setup.inputs.train,
        setup.inputs.validation,
        schedule=setup.schedule,
        plan=plan,
        total_steps=setup.total_steps,
        tokenizer=setup.inputs.tokenizer,
        device=distributed.device_name(setup.world.device),
        lr=f"{lr.kind} lr, peak {lr.peak_lr:.1e} after {lr.warmup_steps} warm-up steps",
    )


def _lr_schedule(setup: Setup) -> LrSchedule:
    optim = setup.config.optim
    peak_lr = optim.lr or DEFAULT_LR[setup.inputs.source.random_weights]
    return LrSchedule.from_config(optim, peak_lr=peak_lr, total_steps=setup.total_steps)


def _train_loader(setup: Setup, plan: RankPlan) -> TrainLoader:
    return TrainLoader(
        setup.inputs.train,
        plan=plan,
        schedule=setup.schedule,
        total_steps=setup.total_steps,
        num_workers=setup.config.data.num_workers,
        pin_memory=setup.world.device.type == "cuda",
        skipped_steps=setup.start.rollbacks.skipped_steps,
    )


def _validation_batches(setup: Setup, plan: RankPlan) -> Callable[[], Iterator[StepBatch]] | None:
    if setup.inputs.validation is None:
        return None
    return validation_batches(
        setup.inputs.validation,
        plan,
        batch_size=setup.schedule.batch_size,
        pin_memory=setup.world.device.type == "cuda",
    )


def _checkpoints(setup: Setup, state: Live) -> CheckpointManager:
    inputs, trainer = setup.inputs, setup.config.trainer
    return CheckpointManager(
        setup.run_dir,
        world=setup.world,
        config=trainer.checkpoint,
        state=RunState(
            model=state.model,
            optimizer=state.optimizer,
            train_batches=state.train_batches,
            guard=state.monitoring.guard,
            loop=state.loop,
            meter=state.monitoring.meter,
            tracking=state.tracking,
            schedule=state.schedule.state_dict(),
        ),
        source=ExportSource(
            Path(inputs.source.path), inputs.chat_template, tuple(inputs.train.dataset.summary.end_token_ids)
        ),
        keep=trainer.max_ckpt_to_keep,
        lock=setup.start.lock,
        fingerprints=setup.lineage.fingerprints,
    )


def _parts(setup: Setup, state: Live, checkpoints: CheckpointManager, plan: RankPlan) -> Parts:
    config, monitoring = setup.config, state.monitoring
    return Parts(
        world=setup.world,
        model=state.model,
        optimizer=state.optimizer,
        schedule=state.schedule,
        guard=monitoring.guard,
        loop=state.loop,
        train_batches=state.train_batches,
        validation_batches=_validation_batches(setup, plan),
        checkpoints=checkpoints,
        tracker=state.tracking or _Silent(),
        meter=monitoring.meter,
        new_validation=monitoring.new_validation,
        detail=monitoring.detail,
        evidence=monitoring.evidence,
        cadence=Cadence(setup.total_steps, config.trainer.save_freq, config.trainer.test_freq),
        seed=config.trainer.seed,
        hang_timeout_s=config.trainer.hang_timeout_s,
        save_timeout_s=config.trainer.checkpoint.save_timeout_s,
        clip_grad=config.optim.clip_grad,
        local_square_sum=clip.local_square_sum,
        clipped_step=clip.clipped_step,
        norm_squares=clip.norm_squares,
    )


class _Silent:
    """Other ranks than 0 report nowhere."""

    def log(self, data: dict[str, float], step: int, kind: str | None = None) -> None:
        pass


def _rank_plan(setup: Setup, model: PreTrainedModel) -> RankPlan:
    data = setup.config.data
    limits = Limits(data.max_token_len_per_gpu, data.micro_batch_size_per_gpu)
    if not model.is_packed:
        limits = replace(limits, max_samples=1)
    return RankPlan(setup.world.rank, setup.world.size, limits, flops.quadratic_cost(model))


def _lineage(config: Config, inputs: Inputs) -> Lineage:
    architecture = hashlib.sha256((Path(inputs.source.path) / "config.json").read_bytes()).hexdigest()[:16]
    fingerprints = describe_run(
        config.resolved,
        data=inputs.train.fingerprint,
        train_batch_size=config.data.train_batch_size,
        seed=config.trainer.seed,
        tokenizer=inputs.tokenizer_digest[:16],
        model_config=architecture,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    return Lineage(fingerprints, tuple(config.trainer.resume_allow))
