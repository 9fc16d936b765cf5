"""Prepares a model on meta before it gets its weights, in the only order that works: recompute,
compile, shard.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from trainer.config import AUTO, OFFLOAD, SELECTIVE, ConfigError, ModelConfig
from trainer.model import attention, expert_exchange
from trainer.model.experts import experts_of
from trainer.model.layer_inputs import HostInputs
from trainer.model.norm import take_over_norms
from trainer.model.packed_lm import decoder_layers
from trainer.runtime.distributed import World, compute_dtype

KEPT_BYTES = 2**30
"""With `reshard_after_forward=auto`, gathered layers are kept for the backward pass if together
they take at most this size (half a billion parameters in bfloat16). Otherwise they are freed after
the forward pass and gathered again.
"""
_MAX_VARIANTS = 32
"""Limit on the compiled variants of one function: kinds of layer x with or without gradients x one
or more tokens. Above its limit (8 by default) torch.compile runs the function uncompiled.
"""


def parallelize(model: PreTrainedModel, config: ModelConfig, world: World) -> None:
    """Change the model in place, as configured: set dtypes, recompute activations, compile layers
    (or, if they are not compiled, use faster norms), and shard with FSDP2.
    """
    owner: Any = model
    owner.sequence_group = world.sequence_group
    trained = getattr(torch, config.master_dtype)
    frozen = compute_dtype(config.fsdp_config.param_dtype, world.device)
    for parameter in filter(torch.is_floating_point, model.parameters()):
        parameter.data = parameter.data.to(trained if parameter.requires_grad else frozen)
    is_selective = config.enable_gradient_checkpointing == SELECTIVE
    if config.enable_gradient_checkpointing and not (is_selective and config.compile):
        recompute_activations(model, str(config.enable_gradient_checkpointing))
    if config.compile:
        compile_layers(model, is_selective=is_selective)  # fuses norms, too
    else:
        take_over_norms(model)
    shard(model, config, world)


def recompute_activations(model: PreTrainedModel, how: str) -> None:
    """Recompute each layer's activations in the backward pass. `selective` keeps the results of
    expensive operations; `offload` keeps the layer's input in host memory.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} cannot recompute activations.\n"
            f"Fix: model.enable_gradient_checkpointing=false"
        )
    settings: dict[str, Any] = {"use_reentrant": False, "context_fn": attention.checkpoint_contexts}
    if how == SELECTIVE:
        settings["context_fn"] = partial(attention.checkpoint_contexts, _selective())
    with warnings.catch_warnings():
        # its new name is not in all supported versions of transformers
        warnings.filterwarnings("ignore", ".*gradient_checkpointing_enable.* is deprecated")
        model.gradient_checkpointing_enable(settings)
    if how == OFFLOAD:
        owner: Any = model
        owner.host_inputs = HostInputs()
        model._set_gradient_checkpointing(gradient_checkpointing_func=owner.host_inputs.checkpoint)


def _selective() -> Callable[[], attention.Contexts]:
    """Return a function that makes contexts for `checkpoint`. They keep the results of linear
    layers, experts and fused attention; everything else is cheap to recompute.
    """
    from torch.nn.attention import varlen  # noqa: F401  registers the operation

    kept = [
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten._grouped_mm,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.torch_attn._varlen_attn,
    ]
    return partial(create_selective_checkpoint_contexts, [each.default for each in kept])


def compile_layers(model: PreTrainedModel, *, is_selective: bool) -> None:
    """Compile each layer's forward and the loss. FSDP's hooks stay outside.

    Shapes are dynamic from the start, because every batch has a different number of tokens.
    Selective recomputation is part of the graph, so each layer must be a single graph. Around
    compiled code, it would keep memory that the code overwrites.
    """
    torch._dynamo.config.recompile_limit = _MAX_VARIANTS
    # With `dynamic=True`, Dynamo would also turn floats (the epsilon of a norm, the scale of LoRA)
    # into float64 CPU tensors: a kernel on the CPU per graph, and a C++ compiler on the machine.
    torch._dynamo.config.specialize_float = True
    for layer in decoder_layers(model):
        forward = layer.forward
        if is_selective:
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=_selective())
        layer.forward = torch.compile(forward, dynamic=True, fullgraph=is_selective)
    head: Any = model.get_output_embeddings()
    head.loss = torch.compile(head.loss.__call__, dynamic=True)


def shard(model: PreTrainedModel, config: ModelConfig, world: World) -> None:
    """Make each decoder layer an FSDP unit, and also the embeddings and the head, unless they share
    a weight.
    """
    fsdp = config.fsdp_config
    dtype = compute_dtype(fsdp.param_dtype, world.device)
    ignored = _used_in_place(model, world, is_offloaded=fsdp.cpu_offload)
    if world.expert_mesh is not None:
        ignored |= expert_exchange.distribute(
            experts_of(model), world.mesh, world.expert_mesh, dtype
        )
    as_unit = partial(
        fully_shard,
        mesh=world.mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy()
        if fsdp.cpu_offload and world.device.type == "cuda"
        else OffloadPolicy(),
        ignored_params=ignored,
    )
    layers = decoder_layers(model)
    reshards = bool(fsdp.reshard_after_forward)
    if fsdp.reshard_after_forward == AUTO:
        numel = sum(p.numel() for layer in layers for p in layer.parameters())
        reshards = world.num_shards > 1 and numel * dtype.itemsize > KEPT_BYTES
    owner: Any = model
    owner.frees_gathered = reshards
    for layer in layers:
        as_unit(layer, reshard_after_forward=reshards)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embeddings.weight is not head.weight:
        as_unit(embeddings, reshard_after_forward=reshards)
        assert isinstance(embeddings, FSDPModule)
        embeddings.set_unshard_in_backward(False)  # the gradient of a lookup needs no weight
        # needed again at once in the backward pass, so it stays gathered
        as_unit(head, reshard_after_forward=False)
    as_unit(model, reshard_after_forward=False)
    for unit in _units(model):
        _sum_gradients(unit, world)
    if config.master_dtype != "float32":
        model.register_forward_pre_hook(_keep_gradients_in_float32)
    model.register_forward_hook(_reshard_without_backward)


def _used_in_place(
    model: PreTrainedModel, world: World, *, is_offloaded: bool
) -> set[nn.Parameter]:
    """Return the parameters that FSDP ignores: frozen ones, if each rank holds the whole model.

    FSDP gathers parameters by copying shards, even if a shard is the whole parameter. A frozen
    parameter already has its compute dtype and has no gradient to reduce. Offloaded parameters must
    still be copied to the device.
    """
    if world.num_shards > 1 or is_offloaded:
        return set()
    return {p for p in model.parameters() if not p.requires_grad and p.ndim}


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _sum_gradients(unit: FSDPModule, world: World) -> None:
    """Sum gradients over ranks instead of averaging them, because the loss is already divided by
    the global token count.

    FSDP2 divides by the world size by default. With a divide factor of 1 alone, FSDP2 would use a
    reduction that gloo does not support. If one rank's documents do not use a parameter (an expert,
    a branch), its gradient on that rank is set to zero. Otherwise ranks would add gradients of
    different parameters.
    """
    if world.size > 1:  # one rank divides by one anyway; a factor would cost a pass
        unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_reduce_scatter_unused_params(True, recurse=False)


def prepare_backward(model: nn.Module, *, is_last: bool) -> None:
    """Enable or disable the communication that a step needs only in its last backward pass.

    Replicas sum their gradients once; until then each keeps a local sum, in the reduction dtype.
    Parameters that stay gathered between the forward and the backward pass also stay gathered for
    the next micro-batch, because the memory peak includes all of them anyway.
    """
    owner: Any = model
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or owner.frees_gathered)


def _keep_gradients_in_float32(model: nn.Module, args: object) -> None:
    """Keep reduced gradients in float32.

    FSDP2 casts them to the parameter's dtype, so a sum over micro-batches would be rounded after
    each of them. FSDP2 sets this dtype at its first forward.
    """
    for unit in _units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            if group._orig_dtype is None or group._orig_dtype == torch.float32:
                continue
            group._orig_dtype = torch.float32
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad_dtype = torch.float32
    for experts in experts_of(model):
        if "exchange" in vars(experts):
            for parameter in experts.parameters(recurse=False):
                parameter.grad_dtype = torch.float32


def _reshard_without_backward(model: nn.Module, args: object, output: object) -> None:
    """Reshard after a forward pass without gradients.

    Units that stay gathered for a backward pass would otherwise remain gathered, and the optimizer
    or a checkpoint would see the gathered copies.
    """
    if not torch.is_grad_enabled():
        for unit in _units(model):
            unit.reshard()
