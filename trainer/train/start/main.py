"""Build a run from its configuration: prepare its inputs, start its ranks, decide where training
starts, and build its parts.

Only this module and `monitoring` name the classes that implement the parts.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from trainer.checkpoint.base_weights import Adapter, digest_together
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.layout import SAVE_TIMEOUT_S, CheckpointInfo
from trainer.checkpoint.lineage import ADAPTER_SCALING, BASE_WEIGHTS, describe_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.model_card import model_card
from trainer.checkpoint.model_files import CONFIG
from trainer.checkpoint.save import Saver
from trainer.checkpoint.start import choose, decide_start, is_own, position_of
from trainer.config import SELECTIVE, Config, ConfigError, parse_duration_s
from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.data.show import announce
from trainer.errors import EXIT_DONE
from trainer.model import adapters, flops
from trainer.model.assemble import build_model
from trainer.optim import OPTIMIZERS
from trainer.optim.schedule import LrSchedule
from trainer.runtime import distributed, seeding
from trainer.runtime.environment import keep_freed_memory, rank_and_size
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.json_lines import flat
from trainer.runtime.log import labelled
from trainer.runtime.progress import LoopState
from trainer.runtime.signals import StopRequest
from trainer.tracking import Tracking
from trainer.train.detection import require_usable_rules
from trainer.train.fit import fit
from trainer.train.run import Run
from trainer.train.start.agreement import facts_of, require_model_unchanged
from trainer.train.start.end import RunResources, already_complete, giving_back
from trainer.train.start.inputs import Inputs, prepare_inputs
from trainer.train.start.monitoring import environment, make_guard, make_meter, make_tracking
from trainer.train.start.setup import RunSetup

logger = logging.getLogger(__name__)
DEFAULT_LR = 1e-5
RANDOM_LR = 2e-3
ADAPTER_LR = 1e-4
"""Peak rates if `optim.lr` is null: for pretrained weights, random weights and LoRA adapters."""


def run(config: Config, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """Build a run from its configuration, and train. Return the exit code.

    1. Reject settings that cannot work, and read the inputs. No process group exists yet, so slow
       work cannot exceed the time limit of a collective.
    2. Connect the ranks, which compare digests of their inputs.
    3. Choose a checkpoint and verify it. A run that is not complete first takes its lock.
    4. Build and train, unless the run is complete.
    """
    trainer = config.trainer
    model = config.model
    device = distributed.pick_device(trainer.device)
    _require_possible(config, device)
    if device.type == "cpu":
        keep_freed_memory()
    if trainer.deterministic:
        seeding.use_deterministic_kernels()
    heartbeat.enter("prepare", limit_s=trainer.dist_timeout_s)
    inputs = prepare_inputs(config, progress=heartbeat.beat)
    world = distributed.start(
        device,
        timeout_s=trainer.dist_timeout_s,
        fsdp_size=model.fsdp_config.fsdp_size,
        sequence_size=model.ulysses_sequence_parallel_size,
        expert_size=model.expert_parallel_size,
        heartbeat=heartbeat,
        facts=facts_of(inputs, progress=heartbeat.beat),
    )
    # Before the first step, a rank may have to wait for a save and for other ranks.
    heartbeat.enter("load", limit_s=trainer.dist_timeout_s + SAVE_TIMEOUT_S)
    # `decide_start` chooses again under the lock. This choice shows whether the run is complete.
    selection = choose(trainer, world)
    total_steps = inputs.total_steps_from(position_of(selection.chosen))
    fingerprints = _fingerprints(inputs)
    start = decide_start(trainer, fingerprints, world, selection=selection, total_steps=total_steps)
    setup = RunSetup(inputs, world, start)
    exit_code = EXIT_DONE
    if start.is_complete:
        assert start.checkpoint is not None, "a complete run has a last checkpoint"
        logger.info(already_complete(setup, start.checkpoint.path, start.position.step))
    else:
        exit_code = train(setup, stop, heartbeat)
    distributed.stop()
    return exit_code


def _require_possible(config: Config, device: torch.device) -> None:
    """Raise `ConfigError` for settings that cannot work on this device or number of ranks.

    Call this before anything slow.
    """
    model = config.model
    num_ranks = rank_and_size()[1]
    is_selective = model.enable_gradient_checkpointing == SELECTIVE
    if device.type == "cpu" and model.compile and is_selective:
        raise ConfigError(
            "'model.enable_gradient_checkpointing=selective' and 'model.compile=true' work together "
            "only on a GPU, because on a CPU attention is not part of the compiled layer.\n"
            "Fix: model.enable_gradient_checkpointing=true"
        )
    require_usable_rules(config.trainer.guard.rules)
    distributed.require_sizes(
        num_ranks,
        fsdp_size=model.fsdp_config.fsdp_size,
        sequence_size=model.ulysses_sequence_parallel_size,
        expert_size=model.expert_parallel_size,
    )


def train(setup: RunSetup, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """Build the parts, resume if there is a checkpoint, train, and end the run.

    Returns the exit code.
    """
    start = setup.start
    heartbeat.report_to(setup.run_dir)
    held = RunResources(setup)
    with giving_back(held, stop):
        if setup.world.is_main:
            held.tracking = make_tracking(setup)
        parts = build_run(setup, held.tracking, stop, heartbeat)
        held.run = parts
        if start.checkpoint is not None:
            _resume(parts, start.checkpoint, setup)
        parts.checkpoints.prepare()  # after the resume, which may delete old checkpoints
        require_model_unchanged(setup.inputs.model_files)
        described: dict[str, Any] = {"environment": environment(setup.world)}
        if start.position.step < setup.total_steps:
            described["sample"] = _announce(parts, setup.inputs)
        if held.tracking is not None:
            held.tracking.start(start.position.step)
            held.tracking.describe(described)
        held.exit_code = fit(parts)
    return held.exit_code


def build_run(
    setup: RunSetup,
    tracking: Tracking | None,
    stop: StopRequest,
    heartbeat: Heartbeat,
) -> Run:
    """Build every part of the run, without loading a checkpoint. Collective."""
    config = setup.config
    inputs = setup.inputs
    world = setup.world
    trainer = config.trainer
    model = build_model(inputs.design, world=world, seed=trainer.seed)
    plan = _rank_plan(setup, model)
    batches = TrainLoader(
        inputs.train,
        plan=plan,
        schedule=setup.schedule,
        total_steps=setup.total_steps,
        num_workers=config.data.num_workers,
        skipped_steps=setup.start.rollbacks.skipped_steps,
    )
    validation_batches = None
    if inputs.validation is not None:
        size = config.data.train_batch_size
        validation_batches = ValidationBatches(inputs.validation, plan, batch_size=size)
    parts = Run(
        world=world,
        model=model,
        optimizer=OPTIMIZERS[config.optim.name](model, config.optim),
        lr_schedule=_lr_schedule(setup),
        batches=batches,
        validation_batches=validation_batches,
        guard=make_guard(setup, tracking),
        loop=LoopState(),
        meter=make_meter(setup, model, tracking),
        location=inputs.train.location,
        tracking=tracking,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        seed=trainer.seed,
        max_norm=config.optim.clip_grad,
        hang_timeout_s=trainer.hang_timeout_s,
        stop=stop,
        heartbeat=heartbeat,
    )
    parts.checkpoints = _checkpoints(setup, parts)
    return parts


def _rank_plan(setup: RunSetup, model: PreTrainedModel) -> RankPlan:
    """Return the plan by which this rank takes its share of each batch.

    The plan contains the limits of a micro-batch, and the cost of a document as a function of its length.
    """
    config = setup.config
    world = setup.world
    max_samples = config.data.micro_batch_size_per_gpu if model.is_packed else 1
    return RankPlan(
        world.data_rank,
        world.num_data_ranks,
        Limits(config.max_micro_batch_tokens, max_samples),
        *flops.length_costs(model),
        pin_memory=world.device.type == "cuda",
        share=(world.sequence_rank, world.sequence_size),
    )


def _lr_schedule(setup: RunSetup) -> LrSchedule:
    """Return the learning-rate schedule. The default peak depends on the trained weights."""
    optim = setup.config.optim
    default = ADAPTER_LR if setup.config.model.has_adapters else DEFAULT_LR
    if setup.inputs.source.random_weights:
        default = RANDOM_LR
    peak_lr = optim.lr or default
    return LrSchedule.from_config(optim, peak_lr=peak_lr, total_steps=setup.total_steps)


def _checkpoints(setup: RunSetup, parts: Run) -> CheckpointManager:
    """Return the manager that saves and loads the parts.

    LoRA exports need the files of the base model.
    """
    config = setup.config
    inputs = setup.inputs
    trainer = setup.config.trainer
    whole = inputs.whole
    adapter = None
    if config.model.has_adapters:
        settings = adapters.settings(parts.model)
        base = inputs.source
        whole = None
        adapter = Adapter(settings, Path(base.path), base.whole)
    end_token_ids = tuple(sorted(inputs.train.summary.end_token_ids))
    source = ExportSource(inputs.model_files, inputs.chat_template, end_token_ids, whole, adapter)
    saver = Saver(
        setup.run_dir,
        parts.model,
        world=setup.world,
        config=trainer.checkpoint,
        source=source,
        keep=trainer.max_ckpt_to_keep,
        lock=setup.start.lock,
        fingerprints=setup.start.fingerprints,
        card=_card_writer(setup),
    )
    return CheckpointManager(
        saver,
        state=parts.stateful_parts(),
        tell=parts.tell,
        save_every_s=parse_duration_s(trainer.save_every),
    )


OF_THIS_MACHINE = (
    "data.cache_dir",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "trainer.checkpoint.mirror",
)
"""Keys that do not describe the model. The model card leaves them out."""


def _card_writer(setup: RunSetup) -> Callable[[Mapping[str, object]], bytes]:
    """Return the function that writes model cards.

    The cards state the base model, the settings that differ from their defaults, and the origins of
    data and code.
    """
    config = setup.config
    fingerprints = setup.start.fingerprints
    base = config.model.partial_pretrain
    defaults = flat(asdict(Config()))
    settings = {
        name: value
        for name, value in flat(config.resolved).items()
        if value != defaults.get(name) and name not in OF_THIS_MACHINE
    }
    origins = {name: fingerprints[name] for name in ("data", "tokenizer", "torch", "transformers")}
    is_hub_id = base.count("/") == 1 and not Path(base).exists()
    return partial(
        model_card,
        base_model=base if is_hub_id else None,
        is_adapter=config.model.has_adapters and config.trainer.checkpoint.export_lora == "adapter",
        settings=settings,
        origins={"base": base, **origins, "ranks": setup.world.size},
    )


def _resume(parts: Run, found: CheckpointInfo, setup: RunSetup) -> None:
    """Load a checkpoint into the parts. Warn if the run's metrics end before it. Collective."""
    parts.checkpoints.load(found)
    parts.checkpoints.settle(found.step, parts.guard.history)  # a crash may have prevented this
    step = parts.batches.step
    if step < setup.total_steps:
        text = f"{found.path}, continuing at step {step + 1} of {setup.total_steps}"
        logger.info(labelled("resume", text))
    if parts.tracking is None or not is_own(found, setup.run_dir):
        return
    if (last_step := parts.tracking.past.last_step) < step:
        logger.warning(
            "metrics.jsonl ends at step %d, but the checkpoint is from step %d: trackers and "
            "report lack the rows in between",
            last_step,
            step,
        )


def _announce(parts: Run, inputs: Inputs) -> str:
    """Log the data, batch and schedule of the run. Return the sample that was shown."""
    lr = parts.lr_schedule
    return announce(
        inputs.train,
        inputs.validation,
        schedule=parts.batches.schedule,
        plan=parts.batches.plan,
        total_steps=parts.batches.last_step,
        tokenizer=inputs.tokenizer,
        device=distributed.device_name(parts.world.device),
        lr=f"{lr.kind} lr, peak {lr.peak_lr:.1e} after {lr.warmup_steps} warm-up steps",
    )


def _fingerprints(inputs: Inputs) -> dict[str, str]:
    """Return the fingerprints that must match when the run resumes. Collective."""
    config = inputs.config
    fingerprints = describe_run(
        config.resolved,
        data=inputs.train.fingerprint,
        validation=inputs.validation.fingerprint if inputs.validation else "none",
        train_batch_size=config.data.train_batch_size,
        seed=config.trainer.seed,
        tokenizer=inputs.tokenizer_digest[:16],
        model_config=hashlib.sha256(inputs.model_files.contents[CONFIG]).hexdigest()[:16],
        model_files=inputs.model_files.digest[:16],
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    if config.model.has_adapters:
        fingerprints[BASE_WEIGHTS] = digest_together(Path(inputs.source.path))
        # those of the configuration, or of the adapter in model.lora_adapter_path
        settings = adapters.settings(inputs.design.model)
        names = ("lora_alpha", "r", "use_rslora")
        fingerprints[ADAPTER_SCALING] = ", ".join(f"{name}={settings[name]}" for name in names)
    elif inputs.whole is not None:
        fingerprints["other_parts"] = inputs.whole.others_digest[:16]
    return fingerprints
