"""Runs one training step of the trainer's model on fake tensors, with simulated ranks.

A plan for a GPU uses fake CPU tensors too, so it needs no GPU. Attention allocates the same memory
as the GPU's kernel.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  collectives of fake tensors
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, PreTrainedModel

from trainer.config import Config
from trainer.data.batch import PackedBatch
from trainer.model import assemble, attention, cpu_attention, load, parallelize, state_mixers
from trainer.model.assemble import Design
from trainer.model.experts import Routers
from trainer.model.layer_inputs import HostInputs
from trainer.model.packed_lm import decoder_layers
from trainer.optim import OPTIMIZERS, clip
from trainer.runtime.distributed import World, make_world
from trainer.tools.plan import live_storage
from trainer.tools.plan.fused_norm import fuse_norms
from trainer.tools.plan.live_storage import LiveStorages, Peaks

FEWEST_LAYERS = 4
"""Number of layers that always run: the first two and the last two. All layers between them use the
same memory.
"""
MAX_RUN_MICRO_BATCHES = 2
"""Number of micro-batches to run at most: the second and all later ones add to existing gradients.
"""


@dataclass(frozen=True)
class Workload:
    """The largest workload of a data rank in a step: the document lengths of its
    largest micro-batch, and the number of micro-batches.
    """

    seqlens: tuple[int, ...]
    num_micro_batches: int

    @property
    def num_tokens(self) -> int:
        return sum(self.seqlens)


@dataclass(frozen=True)
class Job:
    """A configuration in which every machine-dependent setting is resolved."""

    config: Config
    design: Design
    num_ranks: int
    is_cuda: bool
    workload: Workload

    @property
    def elsewhere(self) -> frozenset[str]:
        """Categories that are in host memory instead of on the GPU."""
        if not self.is_cuda:
            return frozenset()
        inputs = frozenset({live_storage.HOST_INPUTS})
        if self.config.model.fsdp_config.cpu_offload:
            return inputs | live_storage.LASTING
        return inputs


ALL = "all"
DEVICE = "device"
HOST = "host"
Measured = dict[str, Peaks]
"""Bytes by category at the memory peak of each phase of a step: for `ALL` tensors, for those on
the `DEVICE`, and for all tensors with the `HOST`'s page-locked blocks at their full size.
"""


def measure(job: Job, num_layers: int) -> Measured:
    """Run a step on fake tensors with only the first layers of the model."""
    live = LiveStorages()
    num_run = min(job.workload.num_micro_batches, MAX_RUN_MICRO_BATCHES)
    # the cache outlives the plan: real masks must not enter the plan, nor fake ones leave it
    cpu_attention._mask.cache_clear()
    try:
        with _fake_world(job) as world:
            is_packed = job.design.reason is None
            model = assemble.on_meta(job.config.model, job.design.source, is_packed=is_packed)
            _keep_layers(model, num_layers)
            parallelize.parallelize(model, job.config.model, world)
            if job.is_cuda:
                attend = partial(attention.packed_attention, device_type="cuda")
                AttentionInterface.register(attention.PACKED, attend)
                fuse_norms(model)
            batch = full_batch(job.workload.seqlens).share(0, world.sequence_size)
            state_mixers.use_references(model)  # kernels cannot run on fake tensors
            with FakeTensorMode(allow_non_fake_inputs=True):
                load.materialize(model, world.device, buffer_device=world.device)
                routers = Routers(model, world.device)
                optimizer = OPTIMIZERS[job.config.optim.name](model, job.config.optim)
                batches = [batch.to(world.device)] * num_run
                with live:
                    follow(model, optimizer, live)
                    run_step(model, routers, optimizer, batches)
    finally:
        attention.register()
        cpu_attention._mask.cache_clear()
    return {
        ALL: live.peaks(),
        DEVICE: live.peaks(elsewhere=job.elsewhere),
        HOST: live.peaks(pinned=job.elsewhere & live_storage.PINNED),
    }


@register_op_impl(lambda func: func is torch.ops.aten._grouped_mm.default)
def _grouped_product(
    mode: FakeTensorMode,
    func: Any,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    *_: Any,
    **__: Any,
) -> Any:
    """Return the experts' product in float32, for which torch's own fake implementation raises an
    error.

    `right` has a matrix for each group, or (in the backward pass) columns whose products with the
    rows of `left` are summed by group.
    """
    if left.dtype == torch.bfloat16:
        return NotImplemented
    groups = () if right.ndim == 3 else (len(offsets),)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def follow(model: PreTrainedModel, optimizer: torch.optim.Optimizer, live: LiveStorages) -> None:
    """Hook `live` into a step, so that it can record the phase and the category of each tensor.

    Phases are `(micro-batch, kind, layer)`. The last two layers count from the end, and all layers
    between the first and last two have the number -3. The recomputation of a layer is part of the
    backward phase. The update phase begins with the optimizer's step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    live.mark([*trained, *model.buffers()], live_storage.PARAMETERS)
    live.mark([p for p in model.parameters() if not p.requires_grad], live_storage.FROZEN)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    live.mark(states, live_storage.OPTIMIZER)
    layers = decoder_layers(model)
    num_begun = itertools.count()
    inputs: HostInputs | None = getattr(model, "host_inputs", None)

    def forward_begins(index: int, *_: Any) -> None:
        if inputs is not None and inputs.newest is not None:
            live.mark([inputs.newest.host], live_storage.HOST_INPUTS)
        if live.phase[1] != "backward":
            live.enter(live.phase[0], "forward", _edge(index, len(layers)))

    def forward_ends(
        index: int,
        layer: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        if live.phase[1] == "backward":
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:  # otherwise no layer before this one is trained
            layer_number = _edge(index, len(layers))
            hidden.register_hook(lambda _: live.enter(live.phase[0], "backward", layer_number))
        if index == len(layers) - 1:
            live.enter(live.phase[0], "head", default=live_storage.HEAD)

    def update_begins(*_: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        live.mark(gradients, live_storage.SHARDED_GRADIENTS)
        live.enter(0, "update")

    model.register_forward_pre_hook(lambda *_: live.enter(next(num_begun), "start"), prepend=True)
    optimizer.register_step_pre_hook(update_begins)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(forward_begins, index), prepend=True)
        layer.register_forward_hook(partial(forward_ends, index))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(
                lambda unit, _: live.mark(unit.parameters(), live_storage.GATHERED)
            )


def run_step(
    model: PreTrainedModel,
    routers: Routers,
    optimizer: clip.Optimizer,
    batches: Sequence[PackedBatch],
) -> None:
    """Run a training step as `trainer.train.step` does, without the reduction over ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for number, batch in enumerate(batches, start=1):
        parallelize.prepare_backward(model, is_last=number == len(batches))
        loss_sum: Tensor = model(batch).loss_sum
        (loss_sum / len(batches) + routers.add(batch, batch.num_tokens)).backward()
        del loss_sum
    total_norm = clip.local_square_sum(parameters).sqrt()
    never = total_norm < 0
    clip.clipped_step(
        optimizer,
        total_norm=total_norm,
        is_skipped=never,
        max_norm=1.0,
        rounding_key=0,
    )
    optimizer.zero_grad(set_to_none=True)


def full_batch(seqlens: tuple[int, ...]) -> PackedBatch:
    """Return documents of these lengths, with every token supervised."""
    num_tokens = sum(seqlens)
    ids_T, labels_T = torch.zeros(2, num_tokens, dtype=torch.int64)
    return PackedBatch.of(
        ids_T,
        labels_T,
        seqlens=seqlens,
        sample_ids=tuple(range(len(seqlens))),
    )


def _keep_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Remove all decoder layers except the first `num_layers`."""
    layers = decoder_layers(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[num_layers:]


def _edge(index: int, num_layers: int) -> int:
    """Return the number of a layer. The last two count from the end, and those in the middle are
    -3.
    """
    half = FEWEST_LAYERS // 2
    return index if index < half else max(index - num_layers, -half - 1)


@contextmanager
def _fake_world(job: Job) -> Iterator[World]:
    """Yield rank 0 of a world whose other ranks are simulated."""
    model = job.config.model
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=0,
        world_size=job.num_ranks,
    )
    try:
        yield make_world(
            torch.device("cpu"),
            fsdp_size=model.fsdp_config.fsdp_size,
            sequence_size=model.ulysses_sequence_parallel_size,
        )
    finally:
        dist.destroy_process_group()
