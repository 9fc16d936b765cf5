"""The only file that knows all concrete parts: it makes them in order and hands them to the trainer (floor 4)."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.manager import CheckpointManager, RunState
from trainer.checkpoint.start import Start, decide_start
from trainer.config import QUICKSTART, Config, ConfigError
from trainer.data.chat import preview, tokenizer_digest
from trainer.data.conversation import RowKeys
from trainer.data.loader import RankPlan, TrainLoader, View, validation_batches
from trainer.data.plan import Limits, Schedule, split_batch
from trainer.data.rows import resolve_files
from trainer.data.sample_writer import PrepareOptions
from trainer.data.token_cache import TokenDataset, prepare, split
from trainer.model import flops, load, packed_lm, parallelize, selfcheck
from trainer.model.packed_lm import ModelSource
from trainer.monitor.guard import NonFiniteGuard
from trainer.monitor.memory import memory_metrics
from trainer.monitor.meters import reduce_loss, reduce_step
from trainer.optim import clip
from trainer.optim.adamw import build_adamw
from trainer.optim.schedule import Schedule as LrSchedule
from trainer.protocols import EXIT_CRASH, EXIT_DONE, DataError
from trainer.quickstart import ensure_quickstart
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.environment import keep_freed_memory, local_rank
from trainer.runtime.signals import StopRequest
from trainer.sft_trainer import Cadence, Parts, SFTTrainer
from trainer.tracking import Tracking

logger = logging.getLogger(__name__)
DEFAULT_LR = {False: 1e-5, True: 2e-3}
"""`optim.lr=null`, for pretrained and for random weights."""
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.py"]


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    train: View
    validation: View | None
    dataset: TokenDataset


def run(config: Config, stop: StopRequest) -> int:
    """One run from its configuration to its exit code."""
    device = distributed.pick_device(config.trainer.device)
    if device.type == "cpu":
        keep_freed_memory()
    inputs = prepare_inputs(config)
    schedule = Schedule(len(inputs.train.lengths), config.data.train_batch_size, config.trainer.seed)
    total_steps = config.trainer.total_training_steps or schedule.steps_per_epoch * config.trainer.total_epochs
    world = distributed.start(
        device, timeout_s=config.trainer.dist_timeout_s, fsdp_size=config.model.fsdp_config.fsdp_size
    )
    start = decide_start(config.trainer, total_steps=total_steps, world=world)
    if start.is_complete:
        done = start.candidates[0]
        logger.info("already complete: %s is step %d of %d; nothing to do", done.path, done.step, total_steps)
        distributed.stop()
        return EXIT_DONE
    return _train(config, inputs, schedule, total_steps, world, start, stop)


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
    dataset = _prepare(config, config.data.train_files, config.data.train_max_samples, tokenizer)
    if config.data.val_files is not None:
        held_out = _prepare(config, config.data.val_files, config.data.val_max_samples, tokenizer)
        train, validation = View.whole(dataset), View.whole(held_out)
    else:
        train_ids, val_ids = split(dataset, val_ratio=config.data.val_ratio, seed=config.trainer.seed)
        limit = config.data.val_max_samples
        train, validation = View(dataset, train_ids), View(dataset, val_ids if limit == -1 else val_ids[:limit])
    if not len(train.lengths):
        raise DataError("no training samples are left; lower data.val_ratio or give more rows")
    return Inputs(source, tokenizer, chat_template, train, validation if len(validation.lengths) else None, dataset)


def resolve_source(config: Config) -> ModelSource:
    """`model.partial_pretrain` as a local directory with a config, and with weights unless they start random."""
    name, model = config.model.partial_pretrain, config.model
    if name == QUICKSTART:
        files = ensure_quickstart(Path(config.data.cache_dir))
        return ModelSource(str(files.model_dir), random_weights=True, trust_remote_code=False)
    if not Path(name).is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"model.partial_pretrain={name}: there is no such directory")
        try:
            name = snapshot_download(name, allow_patterns=_HUB_FILES)
        except Exception as error:
            raise ConfigError(
                f"model.partial_pretrain={name} is no local directory and could not be had from the Hub: {error}"
            ) from error
    if not model.random_weights and not load.has_weights(name):
        raise ConfigError(
            f"model.partial_pretrain={name} has no weights (*.safetensors); "
            f"model.random_weights=true starts from random ones"
        )
    return ModelSource(name, random_weights=model.random_weights, trust_remote_code=model.trust_remote_code)


def _prepare(
    config: Config, files: str | list[str], max_samples: int, tokenizer: PreTrainedTokenizerBase
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
        tokenizer_digest=tokenizer_digest(tokenizer),
        options=options,
        cache_dir=cache_dir,
        wait=local_rank() != 0,
    )


def build_model(config: Config, source: ModelSource, world: World) -> PreTrainedModel:
    """Meta, parallelize, memory, weights, self-check: the model ready to train."""
    architecture = packed_lm.read_config(source)
    is_packed = wants_packing(config, source)
    model = packed_lm.build_on_meta(source, architecture, is_packed=is_packed)
    parallelize.parallelize(model, config.model, world)
    offload = config.model.fsdp_config.cpu_offload
    load.materialize(model, torch.device("cpu") if offload else world.device, buffer_device=world.device)
    load.load_weights(model, source, seed=config.trainer.seed)
    error = selfcheck.packing_error(model, world.device)
    tolerance = selfcheck.TOLERANCE[distributed.compute_dtype(config.model.fsdp_config.param_dtype, world.device)]
    if not error <= tolerance:
        raise ConfigError(
            f"self-check failed: the loss of {type(model).__name__} differs by {error:.1e} from transformers' "
            f"own forward pass (relative; allowed: {tolerance:.0e}); use model.attention=per_document"
        )
    logger.info("self-check: loss equals transformers' own forward pass within %.0e (relative)", max(error, 1e-9))
    return model


def wants_packing(config: Config, source: ModelSource) -> bool:
    """Whether documents share a forward pass, as configured or as the architecture allows."""
    if config.model.attention == "per_document":
        return False
    reason = packed_lm.unpackable_reason(packed_lm.read_config(source))
    if reason is not None and config.model.attention == "packed":
        raise ConfigError(f"model.attention=packed: this model cannot be packed, {reason}; use model.attention=auto")
    return reason is None


def _train(
    config: Config,
    inputs: Inputs,
    schedule: Schedule,
    total_steps: int,
    world: World,
    start: Start,
    stop: StopRequest,
) -> int:
    model = build_model(config, inputs.source, world)
    optimizer = build_adamw(model, config.optim)
    peak_lr = config.optim.lr or DEFAULT_LR[inputs.source.random_weights]
    lr_schedule = LrSchedule.from_config(config.optim, peak_lr=peak_lr, total_steps=total_steps)
    guard = NonFiniteGuard(max_in_a_row=config.trainer.max_nonfinite_steps)
    plan = _rank_plan(config, model, world)
    train_batches = TrainLoader(
        inputs.train,
        plan=plan,
        schedule=schedule,
        total_steps=total_steps,
        num_workers=config.data.num_workers,
        fingerprint=inputs.train.fingerprint,
        pin_memory=world.device.type == "cuda",
    )
    run_dir = Path(config.trainer.default_local_dir)
    tracking = _tracking(config, run_dir, total_steps) if world.is_main else None
    checkpoints = CheckpointManager(
        run_dir,
        world=world,
        config=config.trainer.checkpoint,
        state=RunState(model, optimizer, train_batches, guard, tracking, lr_schedule.state_dict()),
        source=_export_source(inputs),
        keep=config.trainer.max_ckpt_to_keep,
        lock=start.lock,
        fingerprints=_fingerprints(config, inputs),
    )
    exit_code = EXIT_CRASH
    try:
        checkpoints.resume(start.candidates)
        if start.candidates:
            logger.info(
                "Found checkpoint: %s, continuing at step %d", start.candidates[0].path, train_batches.next_step + 1
            )
        _announce(inputs, schedule, plan, lr_schedule, run_dir)
        validation = inputs.validation
        parts = Parts(
            world=world,
            model=model,
            optimizer=optimizer,
            schedule=lr_schedule,
            guard=guard,
            train_batches=train_batches,
            validation_batches=validation_batches(validation, plan, batch_size=schedule.batch_size)
            if validation
            else None,
            checkpoints=checkpoints,
            tracker=tracking or _Silent(),
            stop=stop,
            cadence=Cadence(total_steps, config.trainer.save_freq, config.trainer.test_freq),
            seed=config.trainer.seed,
            clip_grad=config.optim.clip_grad,
            local_square_sum=clip.local_square_sum,
            clip_by_norm=clip.clip_by_norm,
            reduce_step=reduce_step,
            reduce_loss=reduce_loss,
            memory_metrics=memory_metrics,
        )
        exit_code = SFTTrainer(parts).fit()
    finally:
        if tracking is not None:
            tracking.finish(exit_code)
        if start.lock is not None:
            start.lock.release()
    distributed.stop()
    return exit_code


class _Silent:
    """Other ranks than 0 report nowhere."""

    def log(self, data: dict[str, float], step: int) -> None:
        pass


def _rank_plan(config: Config, model: PreTrainedModel, world: World) -> RankPlan:
    limits = Limits(config.data.max_token_len_per_gpu, config.data.micro_batch_size_per_gpu)
    if not model.is_packed:
        limits = replace(limits, max_samples=1)
        logger.info("documents run one by one: this architecture or model.attention=per_document asks for it (slower)")
    return RankPlan(world.rank, world.size, limits, flops.quadratic_cost(model))


def _tracking(config: Config, run_dir: Path, total_steps: int) -> Tracking:
    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        config.resolved,
        run_dir=run_dir,
        total_steps=total_steps,
    )


def _export_source(inputs: Inputs) -> ExportSource:
    return ExportSource(Path(inputs.source.path), inputs.chat_template, tuple(inputs.dataset.summary.end_token_ids))


def _fingerprints(config: Config, inputs: Inputs) -> dict[str, str]:
    """What must not change between a run and its continuation; data and order are compared by the loader."""
    architecture = hashlib.sha256((Path(inputs.source.path) / "config.json").read_bytes()).hexdigest()[:16]
    return {
        "model config": architecture,
        "tokenizer and template": tokenizer_digest(inputs.tokenizer)[:16],
        "max_length": str(config.data.max_length),
        "truncation": config.data.truncation,
    }


def _announce(inputs: Inputs, schedule: Schedule, plan: RankPlan, lr: LrSchedule, run_dir: Path) -> None:
    """The plan of the run in one line, and one sample as the model sees it."""
    train = inputs.train
    first = schedule.samples(0)
    dealt = split_batch(
        train.lengths[first], world_size=plan.world_size, limits=plan.limits, quadratic_cost=plan.quadratic_cost
    )
    tokens, supervised = int(train.lengths.sum()), int(train.num_loss_tokens.sum())
    summary = inputs.dataset.summary
    num_validation = len(inputs.validation.lengths) if inputs.validation else 0
    logger.info(
        f"plan: batch {len(first)} = {plan.world_size} ranks x {len(dealt[0])} micro-batches; {lr.total_steps} steps, "
        f"{schedule.steps_per_epoch} per epoch; {len(train.lengths)} samples, {tokens} tokens, "
        f"{supervised / tokens:.1%} supervised; no padding; rows: {summary.num_truncated / summary.num_rows:.1%} cut, "
        f"{summary.num_dropped} dropped, {summary.num_bad_rows} bad; {num_validation} validation samples; "
        f"{lr.kind} lr, peak {lr.peak_lr:.1e} after {lr.warmup_steps} warm-up steps"
    )
    input_ids, loss_mask = train.sample(int(first[0]))
    logger.info("first sample (%s), supervised part marked:\n%s", train.location(int(first[0])),
                preview(input_ids, loss_mask, inputs.tokenizer))  # fmt: skip
    logger.info("logs and checkpoints: %s", run_dir)
