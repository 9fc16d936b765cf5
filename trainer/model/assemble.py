"""Builds a model that is ready to train from a configuration.

The order is: meta device, sharding, memory, weights, self-check.
"""

import gc
import logging
import math
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer.config import AUTO, ConfigError, ModelConfig
from trainer.model import (
    adapters,
    attention,
    load,
    nf4,
    packed_lm,
    parallelize,
    selfcheck,
    state_mixers,
)
from trainer.model.experts import experts_of
from trainer.model.head_exchange import require_divisible
from trainer.model.losses import LOSSES
from trainer.model.pretrained import ModelSource
from trainer.model.source import require_adapters
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.log import labelled

logger = logging.getLogger(__name__)
_NO_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED")
"""Out-of-memory errors that have no exception type, such as those from cuBLAS."""


@dataclass
class Design:
    """A configured model before it has weights."""

    config: ModelConfig
    source: ModelSource
    reason: str | None
    """The reason why documents run one by one; None if they share forward passes."""
    model: PreTrainedModel
    """The model on meta, with adapters and frozen parameters."""


def design_model(config: ModelConfig, source: ModelSource, *, max_length: int) -> Design:
    """Design a model without reading its weights.

    `max_length`: the maximum document length in tokens. Raise `ConfigError` for a model that cannot be trained,
    or that cannot be trained as configured.
    """
    reason = packed_lm.unpackable_reason(source.config, max_length=max_length)
    if config.attention == "per_document":
        reason = "model.attention=per_document"
    elif config.attention == "packed" and reason is not None:
        raise ConfigError(
            f"model.attention=packed: documents cannot be packed for this model: {reason}.\n"
            f"Fix: model.attention=auto"
        )
    require_adapters(config)
    is_whole = config.ulysses_sequence_parallel_size == 1
    model = on_meta(config, source, is_packed=reason is None, uses_kernels=is_whole)
    design = Design(config, source, reason, model)
    if config.expert_parallel_size > 1 and not experts_of(design.model):
        raise ConfigError(
            f"model.expert_parallel_size={config.expert_parallel_size}: "
            f"{type(design.model).__name__} has no experts.\nFix: model.expert_parallel_size=1"
        )
    if config.ulysses_sequence_parallel_size > 1:
        _require_splittable(design, config.ulysses_sequence_parallel_size)
    return design


def _require_splittable(design: Design, size: int) -> None:
    """Raise `ConfigError` if the tokens of a document cannot be split over ranks."""
    reason = design.reason
    attends_packed = bool(design.model.attends_packed)
    looped = state_mixers.looped_kinds(design.model, only_attention=attends_packed)
    if reason is None and looped:
        reason = f"{', '.join(looped)} would have to see all tokens of a document"
    if reason is not None:
        raise ConfigError(
            f"model.ulysses_sequence_parallel_size={size}: documents of this model cannot be split "
            f"over ranks: {reason}.\nFix: model.ulysses_sequence_parallel_size=1"
        )
    num_heads = getattr(design.source.config, "num_attention_heads", None)
    if isinstance(num_heads, int):
        require_divisible(num_heads, size)


def build_model(design: Design, *, world: World, seed: int) -> PreTrainedModel:
    """Give the designed model its weights and run the self-check. Collective.

    If it fails, try again: first without the document bounds of packages' kernels, then without
    these kernels, then with one document per forward pass. Raise `ConfigError` if loss or gradient
    still differs from transformers' own forward pass.
    """
    config = design.config
    source = design.source
    if design.reason is None and world.device.type == "cuda":
        attention.require_kernel()
        attention.choose_kernel()  # the self-check below tests it
    prepare(design.model, config, source, world=world, seed=seed)
    fault = _fault(design.model, config, world)
    package_kinds = state_mixers.package_kinds(design.model)
    may_unpack = config.attention == AUTO and world.sequence_size == 1 and design.reason is None
    if fault is not None and (package_kinds or may_unpack):
        kinds = ", ".join(package_kinds)
        if design.model.mixes_packed:
            logger.warning("the installed kernels of %s fail the self-check: %s", kinds, fault)
        elif package_kinds:
            logger.warning(
                "the installed kernels of %s fail the self-check, and transformers' slower code "
                "replaces them: %s",
                kinds,
                fault,
            )
            state_mixers.use_references(design.model)
        else:
            logger.warning("packed documents fail the self-check: %s", fault)
            design.reason = "packed documents fail the self-check"
        del design.model
        gc.collect()  # modules and their hooks hold each other
        design.model = on_meta(config, source, is_packed=design.reason is None)
        return build_model(design, world=world, seed=seed)
    if fault is not None:
        way_out = "this model cannot be trained here"
        if world.sequence_size > 1:
            way_out = "model.ulysses_sequence_parallel_size=1 may help"
        elif design.reason is None:
            way_out = "model.attention=per_document may help"
        raise ConfigError(f"self-check failed: {fault}; {way_out}")
    num_trained = sum(p.numel() for p in design.model.parameters() if p.requires_grad)
    num_all = sum(map(nf4.num_weights, design.model.parameters()))
    trained = "all trainable" if num_trained == num_all else f"{num_trained:,} trainable"
    name = type(design.model).__name__.removeprefix("FSDP")
    text = f"{name}, {num_all:,} parameters, {trained}; {how_documents_run(design)}"
    logger.info(labelled("model", text))
    for note in packed_lm.notes(design.model.config):
        logger.info(labelled("", note))
    adapters.log_trained(design.model, config)
    return design.model


def how_documents_run(design: Design) -> str:
    """Describe for the log how documents share forward passes."""
    if design.reason is not None:
        return f"documents run one by one (slower): {design.reason}"
    text = "documents are packed"
    if kernels := state_mixers.kernel_kinds(design.model):
        text += f"; kernels that take document bounds: {', '.join(kernels)}"
    if looped := state_mixers.looped_kinds(design.model):
        text += f"; looped over documents: {', '.join(looped)}"
    return text


def on_meta(
    config: ModelConfig,
    source: ModelSource,
    *,
    is_packed: bool,
    uses_kernels: bool = False,
) -> PreTrainedModel:
    """Build the model without weights, with adapters and frozen parameters."""
    model = packed_lm.build_on_meta(
        source,
        is_packed=is_packed,
        uses_kernels=uses_kernels,
        loss=LOSSES[config.loss],
    )
    adapters.choose_trained(model, config, source)
    return model


def prepare(
    model: PreTrainedModel,
    config: ModelConfig,
    source: ModelSource,
    *,
    world: World,
    seed: int,
) -> None:
    """Shard the model on meta and give it weights. Collective."""
    parallelize.parallelize(model, config, world)
    offload = config.fsdp_config.cpu_offload
    load.materialize(
        model, torch.device("cpu") if offload else world.device, buffer_device=world.device
    )
    load.load_weights(model, source, seed=seed)
    adapters.fill(model, config, source, seed=seed)


def _fault(model: PreTrainedModel, config: ModelConfig, world: World) -> str | None:
    """Run the self-check. Collective.

    Return a fault of any rank on every rank, because they must retry together.
    """
    logger.info(labelled("self-check", "comparing loss and gradient with transformers"))
    if kinds := state_mixers.package_kinds(model):
        names = ", ".join(kinds)
        note = f"the kernels of {names} are tuned at first use, which may take minutes"
        logger.info(labelled("", note))
    faults = distributed.gather(_own_fault(model, config, world))
    return next(filter(None, faults), None)


def _own_fault(model: PreTrainedModel, config: ModelConfig, world: World) -> str | None:
    """Return the most serious fault on this rank, or None."""
    name = type(model).__name__.removeprefix("FSDP")
    try:
        errors = selfcheck.compare(model, world.device, formula=LOSSES[config.loss].formula)
    except torch._dynamo.exc.Unsupported as error:
        raise ConfigError(
            f"model.enable_gradient_checkpointing=selective with model.compile=true needs each "
            f"layer in a single graph, but the layers of {name} cannot be compiled as one "
            f"({str(error).splitlines()[0]}).\n"
            f"Fix: model.enable_gradient_checkpointing=true or false"
        ) from error
    except torch._inductor.exc.InductorError as error:
        raise ConfigError(
            f"model.compile=true: torch cannot compile {name} on this machine: {_gist(error)}\n"
            f"Fix: install what is missing (torch.compile needs a C++ compiler and the headers of "
            f"Python), or set model.compile=false"
        ) from error
    except Exception as error:
        if "does not have a deterministic" in str(error):
            operation = str(error).split(", but you set")[0]
            return f"trainer.deterministic=true is not possible with {name} here: {operation}"
        has_packages = bool(state_mixers.package_kinds(model))
        if (model.is_packed or has_packages) and _is_refusal(error, has_packages=has_packages):
            return f"{name}: {type(error).__name__}: {error}"
        # perhaps only this rank fails: its process ends, and the launcher ends the waiting ranks
        raise
    dtype = distributed.compute_dtype(config.fsdp_config.param_dtype, world.device)
    if math.isnan(errors.foresight):
        return f"the logits of {name} are not finite: check its weights for NaN and infinity"
    if errors.foresight > selfcheck.TOLERANCE[dtype]:
        return f"the logits of {name} depend on later tokens, as in an encoder"
    found = [(f"the loss of {name}", errors.loss, selfcheck.TOLERANCE[dtype])]
    for kind, difference in errors.gradients.items():
        what = f"the gradient of {kind} of {name}"
        found.append((what, difference, selfcheck.GRADIENT_TOLERANCE[dtype]))
    for what, difference, allowed in found:
        if not difference <= allowed:  # NaN is a fault, too
            return (
                f"{what} differs by {difference:.1e} from transformers' own forward pass "
                f"(allowed: {allowed:.0e})"
            )
    loss = max(errors.loss, 1e-9)
    gradient = max(1e-9, *errors.gradients.values())
    kind = str(dtype).removeprefix("torch.")
    logger.info(labelled("", f"equal within {loss:.0e} and {gradient:.0e} ({kind})"))
    return None


def _gist(error: Exception) -> str:
    """Return the line of a compiler message that names the error, else the first line."""
    lines = str(error).splitlines()
    return next((line for line in lines if " error: " in line), lines[0])


def _is_refusal(error: Exception, *, has_packages: bool) -> bool:
    """Return True if a kernel may have refused its arguments, so that a different attention may
    work. The kernels of packages raise errors of any type.

    A full or lost GPU, a lost peer or a Dynamo error occurs with any attention.
    """
    others = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
    is_compiler = type(error).__module__.startswith("torch._dynamo")
    return (
        isinstance(error, Exception if has_packages else RuntimeError | ValueError)
        and not isinstance(error, others)
        and not _NO_MEMORY.search(str(error))
        and not is_compiler
    )
