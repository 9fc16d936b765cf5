"""From a configuration to a model ready to train: meta device, sharding, memory, weights,
self-check, in this order.
"""

import gc
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer.config import AUTO, ConfigError, ModelConfig
from trainer.losses import LOSSES
from trainer.model import adapters, attention, load, packed_lm, parallelize, selfcheck, state_mixers
from trainer.model.head_exchange import require_divisible
from trainer.model.packed_lm import ModelSource
from trainer.model.source import require_adapters
from trainer.runtime import distributed
from trainer.runtime.distributed import World

logger = logging.getLogger(__name__)


def build_model(
    config: ModelConfig, source: ModelSource, *, world: World, seed: int, max_length: int
) -> PreTrainedModel:
    """Collective. Raises `ConfigError` if its loss is not that of transformers' own forward
    pass.
    """
    reason = per_document_reason(config, source, max_length=max_length)
    if reason is None and world.device.type == "cuda":
        attention.require_kernel()
    model = _build(config, source, world=world, seed=seed, is_packed=reason is None)
    fault = _fault(model, config, world)
    if (
        fault is not None
        and reason is None
        and config.attention == AUTO
        and world.sequence_size == 1
    ):
        logger.warning("packed documents fail the self-check: %s", fault)
        reason = "packed ones fail the self-check"
        del model
        gc.collect()  # modules and their hooks hold each other
        model = _build(config, source, world=world, seed=seed, is_packed=False)
        fault = _fault(model, config, world)
    if fault is not None:
        way_out = (
            "model.attention=per_document may help"
            if model.is_packed
            else "it cannot be trained here"
        )
        if world.sequence_size > 1:
            way_out = "model.ulysses_sequence_parallel_size=1 may help"
        raise ConfigError(f"self-check failed: {fault}; {way_out}")
    logger.info("%s", how_documents_run(model, reason))
    for note in packed_lm.notes(model.config):
        logger.info("%s", note)
    adapters.log_trained(model, config)
    return model


def how_documents_run(model: PreTrainedModel, reason: str | None) -> str:
    """After a forward pass. What the rest of a layer gains by packing shows in what does not."""
    if reason is not None:
        return f"documents run one by one (slower): {reason}"
    obstacles = sorted(
        {vars(m)[attention.OBSTACLE] for m in model.modules() if attention.OBSTACLE in vars(m)}
    )
    loops = [
        *state_mixers.looped_kinds(model),
        *(f"attention ({obstacle})" for obstacle in obstacles),
    ]
    return "documents run packed" + (
        f"; looped over documents: {', '.join(loops)}" if loops else ""
    )


def per_document_reason(config: ModelConfig, source: ModelSource, *, max_length: int) -> str | None:
    """Why documents of up to `max_length` tokens run one by one, None if they share forward passes.

    Raises `ConfigError` for a model that cannot be trained, or not as configured, as far as its
    config.json tells.
    """
    architecture = packed_lm.read_config(source)
    if config.attention == "per_document":
        return "model.attention=per_document"
    reason = packed_lm.unpackable_reason(architecture, max_length=max_length)
    if reason is not None and config.attention == "packed":
        raise ConfigError(
            f"model.attention=packed: this model cannot be packed, {reason}; use "
            f"model.attention=auto"
        )
    return reason


def require_splittable(config: ModelConfig, source: ModelSource, *, max_length: int) -> None:
    """Raises `ConfigError` where ranks cannot hold the tokens of a document between them; reads
    no weights.
    """
    if (size := config.ulysses_sequence_parallel_size) == 1:
        return
    architecture = packed_lm.read_config(source)
    reason = per_document_reason(config, source, max_length=max_length)
    if reason is None:
        model = packed_lm.build_on_meta(source, architecture, is_packed=True)
        mixers = state_mixers.looped_kinds(model)
        reason = (
            f"{', '.join(mixers)} would have to see all tokens of a document" if mixers else None
        )
    if reason is not None:
        raise ConfigError(
            f"model.ulysses_sequence_parallel_size={size}: documents of this model cannot be split "
            f"over ranks, {reason}; use 1"
        )
    if isinstance(num_heads := getattr(architecture, "num_attention_heads", None), int):
        require_divisible(num_heads, size)


def require_parts(config: ModelConfig, source: ModelSource) -> None:
    """Raises `ConfigError` for adapters, or parameters to freeze, that the model does not take;
    reads no weights.
    """
    if config.has_adapters or config.freeze:
        require_adapters(config)
        if config.has_adapters and packed_lm.read_architecture(source)[1] is not None:
            raise ConfigError(
                f"model.partial_pretrain={config.partial_pretrain} is a model of several parts, "
                f"for which adapters cannot be trained; full fine-tuning, or model.freeze, trains "
                f"its text part"
            )
        model = packed_lm.build_on_meta(source, packed_lm.read_config(source), is_packed=False)
        adapters.choose_trained(model, config)


def _build(
    config: ModelConfig, source: ModelSource, *, world: World, seed: int, is_packed: bool
) -> PreTrainedModel:
    model = packed_lm.build_on_meta(
        source, packed_lm.read_config(source), is_packed=is_packed, loss=LOSSES[config.loss]
    )
    adapters.choose_trained(model, config)
    parallelize.parallelize(model, config, world)
    offload = config.fsdp_config.cpu_offload
    load.materialize(
        model, torch.device("cpu") if offload else world.device, buffer_device=world.device
    )
    load.load_weights(model, source, seed=seed)
    adapters.fill(model, config, seed=seed)
    return model


def _fault(model: PreTrainedModel, config: ModelConfig, world: World) -> str | None:
    """What the self-check of any rank finds, told to all: another try must be everyone's.
    Collective.
    """
    dtype = distributed.compute_dtype(config.fsdp_config.param_dtype, world.device)
    formula, name = LOSSES[config.loss].formula, type(model).__name__.removeprefix("FSDP")
    errors, refusal = selfcheck.Errors(0.0, {"": 0.0}), None
    try:
        errors = selfcheck.compare(model, world.device, formula=formula)
    except torch._dynamo.exc.Unsupported as error:
        raise ConfigError(
            f"model.enable_gradient_checkpointing=selective with model.compile=true needs each "
            f"layer in one graph, which {name} is not here ({str(error).splitlines()[0]}); use "
            f"true or false"
        ) from error
    except Exception as error:
        if "does not have a deterministic" in str(error):
            operation = str(error).split(", but you set")[0]
            refusal = f"trainer.deterministic=true is not possible with {name} here: {operation}"
        elif model.is_packed and _is_refusal(error):
            refusal = f"{name}: {type(error).__name__}: {error}"
        # on one rank alone, perhaps: its process ends, and the launcher ends those that wait for it
        else:
            raise
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, (errors.loss, errors.foresight, refusal))
    loss, foresight = (
        max((report[kind] for report in reports), key=_or_infinity) for kind in (0, 1)
    )
    kind, gradient = max(errors.gradients.items(), key=lambda item: _or_infinity(item[1]))
    if refusals := [refusal for *_, refusal in reports if refusal]:
        return str(refusals[0])
    if not foresight <= selfcheck.TOLERANCE[dtype]:
        return f"the logits of {name} change with tokens that come later, as those of an encoder do"
    for what, found, allowed in (
        (f"the loss of {name}", loss, selfcheck.TOLERANCE[dtype]),
        (f"the gradient of {kind} of {name}", gradient, selfcheck.GRADIENT_TOLERANCE[dtype]),
    ):
        if not found <= allowed:
            return f"{what} differs by {found:.1e} from transformers' own forward pass (allowed: {allowed:.0e})"
    within = f"{max(loss, 1e-9):.0e}, its gradient within {max(gradient, 1e-9):.0e} (relative)"
    computed = str(dtype).removeprefix("torch.")
    logger.info(
        "self-check: loss equals transformers' own forward pass within %s, in %s", within, computed
    )
    return None


def _is_refusal(error: Exception) -> bool:
    """Whether it may be what a kernel says of its arguments, which another attention need not say.

    A card that is full or lost, a peer that is gone and a missing compiler fail with any attention.
    """
    others = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
    is_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    return (
        isinstance(error, RuntimeError | ValueError)
        and not isinstance(error, others)
        and not is_compiler
    )


def _or_infinity(error: float) -> float:
    return math.inf if math.isnan(error) else error
