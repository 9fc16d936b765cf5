"""One training step of the project's own model on tensors without memory, among ranks that do not exist (floor 5).

For a GPU too the fake tensors are CPU tensors, so that no GPU is needed; attention behaves as the GPU's kernel does.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  collectives of fake tensors
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from trainer.batch import PackedBatch
from trainer.config import AUTO, Config, ConfigError, ModelConfig
from trainer.model import adapters, attention, cpu_attention, load, packed_lm, parallelize
from trainer.model.experts import Routers
from trainer.model.layer_inputs import HostInputs
from trainer.model.packed_lm import ModelSource, decoder_layers
from trainer.optim import OPTIMIZERS, clip
from trainer.planner import live_storage
from trainer.planner.fused_norm import fuse_norms
from trainer.planner.live_storage import LiveStorages, Phase
from trainer.planner.operations import DeviceOperation, Operations
from trainer.planner.roofline import AWAITED, FROM_HOST, TO_HOST
from trainer.runtime.distributed import World, make_world, mesh_dimensions

FEWEST_LAYERS = 4
"""The first two layers and the last two; those between are alike."""
MAX_RUN_MICRO_BATCHES = 2
"""The second and all later ones find the gradients of those before them."""


@dataclass(frozen=True)
class Workload:
    """The most a data rank may have to run in a step: its fullest micro-batch as document lengths, and how many."""

    seqlens: tuple[int, ...]
    num_micro_batches: int

    @property
    def num_tokens(self) -> int:
        return sum(self.seqlens)


@dataclass(frozen=True)
class Job:
    """What is planned: a configuration in which nothing depends on the machine any more."""

    config: Config
    source: ModelSource
    num_ranks: int
    is_cuda: bool
    is_packed: bool
    is_compiled: bool
    """Counted as such; its memory is that of uncompiled layers, which hold more."""
    workload: Workload

    @property
    def elsewhere(self) -> frozenset[str]:
        """Categories in host memory that a GPU does not hold."""
        if not self.is_cuda:
            return frozenset()
        inputs = frozenset({live_storage.HOST_INPUTS})
        return inputs | live_storage.LASTING if self.config.model.fsdp_config.cpu_offload else inputs


@dataclass(frozen=True)
class Measured:
    """One step on so many layers: bytes by category at the fullest moment of each phase, of everything, of what is on
    the device and of everything with page-locked memory as the host has it; how often it asks for which operation.
    """

    num_layers: int
    everything: dict[Phase, Counter[str]]
    on_device: dict[Phase, Counter[str]]
    on_host: dict[Phase, Counter[str]]
    operations: Counter[DeviceOperation]


def measure(job: Job, num_layers: int) -> Measured:
    """One step of the model with only its first layers, on fake tensors."""
    live = LiveStorages()
    operations = Operations(live, job.workload.seqlens, is_compiled=job.is_compiled)
    num_run = min(job.workload.num_micro_batches, MAX_RUN_MICRO_BATCHES)
    cpu_attention._mask.cache_clear()  # kept for the whole process: no real masks in the plan, no fake ones later
    try:
        with _fake_world(job) as world:
            model = on_meta(job)
            _keep_layers(model, num_layers)
            attention.register("cuda" if job.is_cuda else None)
            parallelize.parallelize(model, job.config.model, world)
            if job.is_cuda:
                fuse_norms(model)
            batch = full_batch(job.workload.seqlens).share(0, world.sequence_size)
            with FakeTensorMode(allow_non_fake_inputs=True):
                load.materialize(model, world.device, buffer_device=world.device)
                routers = Routers(model, world.device, is_asked=job.config.model.router_loss == AUTO)
                optimizer = OPTIMIZERS[job.config.optim.name](model, job.config.optim)
                batches = [batch.to(world.device)] * num_run
                with live, operations:
                    if job.is_cuda:
                        put_on_host(model, job.config.model, operations, live, world)
                    update_begins = follow(model, optimizer, live)
                    run_step(model, routers, optimizer, batches, update_begins=update_begins)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"model.partial_pretrain={job.source.path}: the memory of this architecture depends on its data, which a "
            f"plan does not see ({error})"
        ) from error
    finally:
        attention.register()
        cpu_attention._mask.cache_clear()
    return Measured(
        num_layers=num_layers,
        everything=live.peaks(),
        on_device=live.peaks(elsewhere=job.elsewhere),
        on_host=live.peaks(pinned=job.elsewhere & live_storage.PINNED),
        operations=operations.counts,
    )


@register_op_impl(lambda func: func is torch.ops.aten._grouped_mm.default)
def _grouped_product(
    mode: FakeTensorMode, func: Any, left: Tensor, right: Tensor, offsets: Tensor, *_: Any, **__: Any
) -> Any:
    """Of experts in float32, which the kernels take and torch's own shape function does not; the rest is left to that.

    Rows by group times a matrix each, or (the gradient of those) rows and columns whose products are summed by group.
    """
    if left.dtype == torch.bfloat16:
        return NotImplemented
    groups = () if right.ndim == 3 else (len(offsets),)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def follow(model: PreTrainedModel, optimizer: torch.optim.Optimizer, live: LiveStorages) -> Callable[[], None]:
    """Let the parts of a step say when they begin, and what they hold. Returns what to call behind the last backward
    pass; else the update begins with the optimizer's step.

    Phases are `(micro-batch, kind, layer)`; the last two layers count from the end, all but the first and last two are
    -3. A layer computed again in the backward pass belongs to that.
    """
    live.mark([*(p for p in model.parameters() if p.requires_grad), *model.buffers()], live_storage.PARAMETERS)
    live.mark([p for p in model.parameters() if not p.requires_grad], live_storage.FROZEN)
    live.mark([tensor for state in optimizer.state.values() for tensor in state.values()], live_storage.OPTIMIZER)
    layers, num_begun = decoder_layers(model), itertools.count()
    inputs: HostInputs | None = getattr(model, "host_inputs", None)

    def forward_begins(index: int, *_: Any) -> None:
        if inputs is not None and inputs.newest is not None:
            live.mark([inputs.newest.host], live_storage.HOST_INPUTS)
        if live.phase[1] != "backward":
            live.enter(live.phase[0], "forward", _edge(index, len(layers)))

    def forward_ends(index: int, layer: nn.Module, args: Any, output: Any) -> None:
        if live.phase[1] == "backward":
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:  # else nothing in front of it is trained
            hidden.register_hook(lambda _: live.enter(live.phase[0], "backward", _edge(index, len(layers))))
        if index == len(layers) - 1:
            live.enter(live.phase[0], "head", default=live_storage.HEAD)

    def update_begins(*_: Any) -> None:
        if live.phase[1] == "update":  # torch's own step, within ours, calls the hooks again
            return
        live.mark([p.grad for p in model.parameters() if p.grad is not None], live_storage.SHARDED_GRADIENTS)
        live.enter(0, "update")

    model.register_forward_pre_hook(lambda *_: live.enter(next(num_begun), "start"), prepend=True)
    optimizer.register_step_pre_hook(update_begins)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(forward_begins, index), prepend=True)
        layer.register_forward_hook(partial(forward_ends, index))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(lambda unit, _: live.mark(unit.parameters(), live_storage.GATHERED))
    return update_begins


def put_on_host(
    model: PreTrainedModel, config: ModelConfig, operations: Operations, live: LiveStorages, world: World
) -> None:
    """Say what a GPU does not hold: with CPU offload parameters and their gradients, for which FSDP2 waits from the
    second micro-batch on, to add them up there; inputs of layers that are put away.

    A rank without others gathers nothing, and fetches nothing ahead.
    """
    inputs: HostInputs | None = getattr(model, "host_inputs", None)
    added_to = set[Tensor]()

    def reduced(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter in added_to:
            operations.count_copy(AWAITED, parameter.grad)
        else:  # of replicas in the last micro-batch, but once
            operations.count_copy(TO_HOST, parameter.grad, phase=(0, *live.phase[1:]))
        added_to.add(parameter)
        operations.hold([parameter.grad])

    def put_away(*_: Any) -> None:
        if inputs is not None and inputs.newest is not None and live.phase[1] == "forward":
            operations.count_copy(TO_HOST, inputs.newest.host)
            operations.hold([inputs.newest.host])

    if inputs is not None:
        for layer in decoder_layers(model):
            layer.register_forward_hook(put_away)
    if config.fsdp_config.cpu_offload:
        operations.hold(model.parameters(), fetch=FROM_HOST if world.num_shards > 1 else AWAITED)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduced)


def run_step(
    model: PreTrainedModel,
    routers: Routers,
    optimizer: clip.Optimizer,
    batches: Sequence[PackedBatch],
    *,
    update_begins: Callable[[], None] = lambda: None,
) -> None:
    """What a training step does on the device, but for the one reduction that the host waits for."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for number, batch in enumerate(batches, start=1):
        parallelize.prepare_backward(model, is_last=number == len(batches))
        loss_sum: Tensor = model(batch).loss_sum
        (loss_sum / len(batches) + routers.add(batch, batch.num_tokens)).backward()
        del loss_sum
    update_begins()
    total_norm = clip.local_square_sum(parameters).sqrt()
    clip.clipped_step(optimizer, total_norm=total_norm, is_skipped=total_norm < 0, max_norm=1.0, rounding_key=0)
    optimizer.zero_grad(set_to_none=True)


def full_batch(seqlens: tuple[int, ...]) -> PackedBatch:
    """Documents of these lengths, every token supervised."""
    num_tokens, sample_ids = sum(seqlens), tuple(range(len(seqlens)))
    ids_T, labels_T = torch.zeros(2, num_tokens, dtype=torch.int64)
    return PackedBatch.of(ids_T, labels_T, torch.arange(num_tokens), seqlens=seqlens, sample_ids=sample_ids)


def on_meta(job: Job) -> PreTrainedModel:
    model = packed_lm.build_on_meta(job.source, packed_lm.read_config(job.source), is_packed=job.is_packed)
    adapters.choose_trained(model, job.config.model)
    return model


def _keep_layers(model: PreTrainedModel, num_layers: int) -> None:
    layers = decoder_layers(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[num_layers:]


def _edge(index: int, num_layers: int) -> int:
    """Number of a layer: the last two count from the end, all others but the first two are -3."""
    half = FEWEST_LAYERS // 2
    return index if index < half else max(index - num_layers, -half - 1)


@contextmanager
def _fake_world(job: Job) -> Iterator[World]:
    """Rank 0 among ranks that do not exist."""
    dimensions = mesh_dimensions(job.num_ranks, fsdp_size=job.config.model.fsdp_config.fsdp_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.num_ranks)
    try:
        size = job.config.model.ulysses_sequence_parallel_size
        yield make_world(torch.device("cpu"), dimensions, sequence_size=size)
    finally:
        dist.destroy_process_group()
