"""The only file that knows all concrete parts: it makes them in order and hands them to the trainer (floor 4)."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.lineage import Lineage, describe_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import RunState
from trainer.checkpoint.start import RunShape, Start, decide_start
from trainer.config import QUICKSTART, Config, ConfigError
from trainer.data.announce import announce
from trainer.data.chat import tokenizer_digest
from trainer.data.conversation import RowKeys
from trainer.data.loader import RankPlan, TrainLoader, View, validation_batches
from trainer.data.plan import Limits, Schedule
from trainer.data.rows import resolve_files
from trainer.data.sample_writer import PrepareOptions
from trainer.data.token_cache import TokenDataset, prepare, split
from trainer.model import flops
from trainer.model.assemble import build_model
from trainer.model.packed_lm import ModelSource
from trainer.model.source import find_model
from trainer.monitor.guard import NonFiniteGuard
from trainer.monitor.memory import memory_metrics
from trainer.monitor.meters import reduce_loss, reduce_step
from trainer.optim import clip
from trainer.optim.adamw import build_adamw
from trainer.optim.schedule import Schedule as LrSchedule
from trainer.protocols import EXIT_CRASH, EXIT_DONE, DataError, Position
from trainer.quickstart import ensure_quickstart
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.environment import keep_freed_memory, local_rank
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest
from trainer.sft_trainer import Cadence, LoopState, Parts, SFTTrainer
from trainer.tracking import Tracking

logger = logging.getLogger(__name__)
DEFAULT_LR = {False: 1e-5, True: 2e-3}
"""`optim.lr=null`, for pretrained and for random weights."""


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    tokenizer_digest: str
    chat_template: str | None
    train: View
    validation: View | None


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
    optimizer: torch.optim.Optimizer
    train_batches: TrainLoader
    guard: NonFiniteGuard
    loop: LoopState
    tracking: Tracking | None
    schedule: LrSchedule


def run(config: Config, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """One run from its configuration to its exit code."""
    device = distributed.pick_device(config.trainer.device)
    if device.type == "cpu":
        keep_freed_memory()
    inputs = prepare_inputs(config)
    world = distributed.start(
        device, timeout_s=config.trainer.dist_timeout_s, fsdp_size=config.model.fsdp_config.fsdp_size
    )

    def schedule_from(position: Position) -> Schedule:
        return Schedule(len(inputs.train.lengths), config.data.train_batch_size, config.trainer.seed, position)

    def total_steps(position: Position) -> int:
        trainer = config.trainer
        return trainer.total_training_steps or schedule_from(position).steps_until(trainer.total_epochs)

    lineage = _lineage(config, inputs)
    shape = RunShape(len(inputs.train.lengths), config.data.train_batch_size, total_steps, lineage)
    start = decide_start(config.trainer, shape, world)
    schedule, num_steps = schedule_from(start.position), total_steps(start.position)
    setup = Setup(config, inputs, schedule, num_steps, lineage, world, start)
    exit_code = EXIT_DONE
    if start.is_complete:
        assert start.checkpoint is not None
        logger.info(f"already complete: {start.checkpoint.path} has all {setup.total_steps} steps; nothing to do")
    else:
        exit_code = train(setup, stop, heartbeat)
    distributed.stop()
    return exit_code


def train(setup: Setup, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """Build, resume, fit; the trackers and the run directory's lock are given back however it ends."""
    trainer, tracking = setup.config.trainer, None
    if setup.world.is_main:
        tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            setup.config.resolved,
            run_dir=setup.run_dir,
            total_steps=setup.total_steps,
        )
    exit_code = EXIT_CRASH
    try:
        model = build_model(setup.config.model, setup.inputs.source, world=setup.world, seed=trainer.seed)
        plan = _rank_plan(setup, model)
        lr_schedule = _lr_schedule(setup)
        state = Live(
            model=model,
            optimizer=build_adamw(model, setup.config.optim),
            train_batches=_train_loader(setup, plan),
            guard=NonFiniteGuard(max_in_a_row=trainer.max_nonfinite_steps),
            loop=LoopState(),
            tracking=tracking,
            schedule=lr_schedule,
        )
        checkpoints = _checkpoints(setup, state)
        checkpoints.require_space()
        if (found := setup.start.checkpoint) is not None:
            checkpoints.load(found)
            next_step = setup.start.position.step + 1
            logger.info("Found checkpoint: %s, continuing at step %d of %d", found.path, next_step, setup.total_steps)
        announce(
            setup.inputs.train,
            setup.inputs.validation,
            schedule=setup.schedule,
            plan=plan,
            total_steps=setup.total_steps,
            tokenizer=setup.inputs.tokenizer,
            lr=f"{lr_schedule.kind} lr, peak {lr_schedule.peak_lr:.1e} after {lr_schedule.warmup_steps} warm-up steps",
        )
        logger.info("run: %s", setup.run_dir)
        exit_code = SFTTrainer(_parts(setup, state, checkpoints, plan), stop, heartbeat).fit()
    finally:
        if tracking is not None:
            tracking.finish(exit_code)
        if setup.start.lock is not None:
            setup.start.lock.release()
    return exit_code


def prepare_inputs(config: Config) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the machine's first rank does the work once."""
    source = resolve_source(config)
    tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    chat_template = None
    if config.data.chat_template is not None:
        try:
            chat_template = Path(config.data.chat_template).read_text()
        except OSError as error:
            raise ConfigError(f"data.chat_template={config.data.chat_template}: {error.strerror}") from error
        tokenizer.chat_template = chat_template
    digest = tokenizer_digest(tokenizer)  # half a second for a large vocabulary
    dataset = _prepare(config, config.data.train_files, config.data.train_max_samples, tokenizer, digest)
    if config.data.val_files is not None:
        held_out = _prepare(config, config.data.val_files, config.data.val_max_samples, tokenizer, digest)
        train, validation = View.whole(dataset), View.whole(held_out)
    else:
        train_ids, val_ids = split(dataset, val_ratio=config.data.val_ratio, seed=config.trainer.seed)
        limit = config.data.val_max_samples
        train, validation = View(dataset, train_ids), View(dataset, val_ids if limit == -1 else val_ids[:limit])
    if not len(train.lengths):
        raise DataError("no training samples are left; lower data.val_ratio or give more rows")
    return Inputs(source, tokenizer, digest, chat_template, train, validation if len(validation.lengths) else None)


def resolve_source(config: Config) -> ModelSource:
    model = config.model
    if model.partial_pretrain == QUICKSTART:
        files = ensure_quickstart(Path(config.data.cache_dir))
        return ModelSource(str(files.model_dir), random_weights=True, trust_remote_code=False)
    path = find_model(model.partial_pretrain, random_weights=model.random_weights)
    return ModelSource(path, random_weights=model.random_weights, trust_remote_code=model.trust_remote_code)


def _prepare(
    config: Config, files: str | list[str], max_samples: int, tokenizer: PreTrainedTokenizerBase, digest: str
) -> TokenDataset:
    data = config.data
    cache_dir = Path(data.cache_dir)
    if files == QUICKSTART:
        files = str(ensure_quickstart(cache_dir).train_file)
    options = PrepareOptions(
        keys=RowKeys(data.messages_key, data.tools_key, data.prompt_key, data.response_key),
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad_row=data.on_bad_row,
        max_bad_fraction=data.max_bad_fraction,
        max_samples=max_samples,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    return prepare(
        resolve_files(files),
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        options=options,
        cache_dir=cache_dir,
        wait=local_rank() != 0,
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
            guard=state.guard,
            loop=state.loop,
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
    config, validation = setup.config, setup.inputs.validation
    batches = validation_batches(validation, plan, batch_size=setup.schedule.batch_size) if validation else None
    return Parts(
        world=setup.world,
        model=state.model,
        optimizer=state.optimizer,
        schedule=state.schedule,
        guard=state.guard,
        loop=state.loop,
        train_batches=state.train_batches,
        validation_batches=batches,
        checkpoints=checkpoints,
        tracker=state.tracking or _Silent(),
        cadence=Cadence(setup.total_steps, config.trainer.save_freq, config.trainer.test_freq),
        seed=config.trainer.seed,
        hang_timeout_s=config.trainer.hang_timeout_s,
        save_timeout_s=config.trainer.checkpoint.save_timeout_s,
        clip_grad=config.optim.clip_grad,
        local_square_sum=clip.local_square_sum,
        clipped_step=clip.clipped_step,
        reduce_step=reduce_step,
        reduce_loss=reduce_loss,
        memory_metrics=memory_metrics,
    )


class _Silent:
    """Other ranks than 0 report nowhere."""

    def log(self, data: dict[str, float], step: int) -> None:
        pass


def _rank_plan(setup: Setup, model: PreTrainedModel) -> RankPlan:
    data = setup.config.data
    limits = Limits(data.max_token_len_per_gpu, data.micro_batch_size_per_gpu)
    if not model.is_packed:
        limits = replace(limits, max_samples=1)
        logger.info("documents run one by one: this architecture or model.attention=per_document asks for it (slower)")
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
