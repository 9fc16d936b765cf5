"""The memory that a configuration takes on each rank, from a step measured on fake tensors (floor 5)."""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, inf, prod

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.config import AUTO, QUICKSTART, Config, DataConfig
from trainer.model import assemble
from trainer.model.flops import step_flops
from trainer.model.packed_lm import ModelSource, decoder_layers
from trainer.model.source import find_architecture
from trainer.planner.fake_step import FEWEST_LAYERS, Job, Measured, Workload, measure, on_meta
from trainer.planner.live_storage import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    GRADIENTS,
    HEAD,
    HOST_INPUTS,
    LASTING,
    OPTIMIZER,
    PARAMETERS,
    SHARDED_GRADIENTS,
    Phase,
)
from trainer.planner.operations import ALL_REDUCE, ALL_TO_ALL, GATHER, REDUCE, DeviceOperation
from trainer.planner.roofline import AWAITED, COPIES, repeats
from trainer.run.inputs import resolve_source, source_at
from trainer.runtime.distributed import compute_dtype, mesh_dimensions, require_divided
from trainer.runtime.environment import pinned_bytes

SAVE_COPY = "copy of an asynchronous save"
NAMES = (PARAMETERS, FROZEN, OPTIMIZER, SHARDED_GRADIENTS, GRADIENTS, GATHERED, ACTIVATIONS, HOST_INPUTS, HEAD)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at the fullest moment of a step by category, on its device and beside it in host memory, and
    what it receives and sends in a step.
    """

    num_ranks: int
    workload: Workload
    num_parameters: int
    num_layers: int
    num_measured_layers: tuple[int, ...]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    operations: Counter[DeviceOperation]
    saved_bytes: int
    optimizer_bytes: int
    """Of this rank in a checkpoint, and of that the optimizer's state."""
    model_dir: str
    needed_flops: float | None
    """Of a micro-batch, forward and backward, as MFU counts them; None of a model whose cost is not known."""
    num_trained: int

    @property
    def gathered_bytes(self) -> int:
        """Received from other ranks in a step."""
        return self._exchanged_bytes({GATHER})

    @property
    def reduced_bytes(self) -> int:
        """Sent to other ranks in a step."""
        return self._exchanged_bytes({REDUCE, ALL_REDUCE})

    @property
    def heads_bytes(self) -> int:
        """Sent to the ranks of the same micro-batch in a step, for attention."""
        return self._exchanged_bytes({ALL_TO_ALL})

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """To and from host memory in a step; those of them that the step waits for before it goes on."""
        return self._exchanged_bytes(COPIES), self._exchanged_bytes({AWAITED})

    def _exchanged_bytes(self, kinds: set[str]) -> int:
        number = self.workload.num_micro_batches
        asked = self.operations.items()
        return sum(n * op.size_bytes * repeats(op, number) for op, n in asked if op.kind in kinds)

    @property
    def peak_bytes(self) -> int:
        return sum(self.device_bytes.values())


def plan_memory(config: Config, num_ranks: int) -> MemoryPlan:
    """The plan of rank 0, which holds the largest shards. Raises `ConfigError` for a model that cannot be planned.

    Above five layers, all alike, a step is measured on four and on five: every phase of it (first and last two layers,
    forward and backward, head, optimizer) grows with each layer between by what the fifth adds.
    """
    job = _job(config, num_ranks)
    model = on_meta(job)
    layers = decoder_layers(model)
    if len(layers) <= FEWEST_LAYERS + 1 or not _are_alike(model, layers):
        return _plan(job, model, measure(job, len(layers)), (len(layers),))
    few, more = (measure(job, number) for number in (FEWEST_LAYERS, FEWEST_LAYERS + 1))
    return _plan(job, model, extrapolated(few, more, len(layers)), (few.num_layers, more.num_layers))


def heaviest_workload(data: DataConfig, num_ranks: int, *, is_packed: bool) -> Workload:
    """Micro-batches as full as their limits and the rank's share of the batch allow, in documents of `max_length`.

    No rank gets more while the cost of a sample is linear in its length.
    """
    share = ceil(data.train_batch_size / num_ranks)
    max_samples = min(share, (data.micro_batch_size_per_gpu or inf) if is_packed else 1)
    num_tokens = int(min(data.max_token_len_per_gpu or inf, max_samples * data.max_length))
    num_whole, rest = divmod(num_tokens, data.max_length)
    seqlens = (data.max_length,) * num_whole + ((rest,) if rest else ())
    return Workload(seqlens, ceil(ceil(data.train_batch_size / num_whole) / num_ranks))


def extrapolated(few: Measured, more: Measured, num_layers: int) -> Measured:
    """A step on `num_layers` layers, from the same on fewer and on one more than those."""
    num_between = num_layers - few.num_layers

    def grown(a: int, b: int) -> int:
        return a + (b - a) * num_between

    def all_grown(a: dict[Phase, Counter[str]], b: dict[Phase, Counter[str]]) -> dict[Phase, Counter[str]]:
        return {p: Counter({name: grown(a[p][name], b[p][name]) for name in a[p] | b[p]}) for p in a}

    return Measured(
        num_layers=num_layers,
        everything=all_grown(few.everything, more.everything),
        on_device=all_grown(few.on_device, more.on_device),
        on_host=all_grown(few.on_host, more.on_host),
        operations=Counter(  # of one that grows instead: so many times the larger, less the smaller
            {op: grown(few.operations[op], more.operations[op]) for op in few.operations | more.operations}
        ),
    )


def _plan(job: Job, model: PreTrainedModel, measured: Measured, num_measured_layers: tuple[int, ...]) -> MemoryPlan:
    device = max(measured.on_device.values(), key=lambda held: held.total())
    most = {name: max(held[name] for held in measured.everything.values()) for name in LASTING}
    on_host = {name: max(held[name] for held in measured.on_host.values()) for name in NAMES if name in job.elsewhere}
    host = {name: size_bytes for name, size_bytes in on_host.items() if size_bytes}
    if SHARDED_GRADIENTS in host:
        host[SHARDED_GRADIENTS] = _pinned_gradient_bytes(job, model)
    saved = most[PARAMETERS] + most[OPTIMIZER] + most[FROZEN] * (not job.config.model.has_adapters)
    return MemoryPlan(
        num_ranks=job.num_ranks,
        workload=job.workload,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        num_layers=measured.num_layers,
        num_measured_layers=num_measured_layers,
        device_bytes={name: device[name] for name in NAMES if name not in (HOST_INPUTS, FROZEN) or device[name]},
        host_bytes=host | {SAVE_COPY: saved * job.config.trainer.checkpoint.async_save},
        operations=measured.operations,
        saved_bytes=saved,
        optimizer_bytes=most[OPTIMIZER],
        model_dir=job.source.path,
        needed_flops=_needed_flops(model, job.workload),
    )


def _pinned_gradient_bytes(job: Job, model: PreTrainedModel) -> int:
    """Of the float32 gradients that FSDP copies to page-locked memory, one after the other; on the device that the plan
    runs on they are parts of one tensor for each layer.
    """
    fsdp_size = job.config.model.fsdp_config.fsdp_size
    num_shards = mesh_dimensions(job.num_ranks, fsdp_size=fsdp_size)["fsdp"]
    trained = (parameter.shape for parameter in model.parameters() if parameter.requires_grad)
    return sum(pinned_bytes(4 * ceil(shape[0] / num_shards) * prod(shape[1:])) for shape in trained)


def _needed_flops(model: PreTrainedModel, workload: Workload) -> float | None:
    flops = step_flops(model)
    if flops is None:
        return None
    per_token = flops.per_token + flops.per_loss_token
    return per_token * workload.num_tokens + flops.per_squared_length * sum(n * n for n in workload.seqlens)


def _job(config: Config, num_ranks: int) -> Job:
    """Settle what a run would take from its machine; a GPU is assumed unless `trainer.device=cpu`. Compiled layers are
    planned as uncompiled ones, which hold more.
    """
    model, is_cuda = config.model, config.trainer.device != "cpu"
    fsdp = model.fsdp_config
    if is_cuda and fsdp.param_dtype == AUTO:
        is_fp32 = torch.cuda.is_available() and compute_dtype(AUTO, torch.device("cuda")) == torch.float32
        fsdp = replace(fsdp, param_dtype="float32" if is_fp32 else "bfloat16")
    is_compiled, config = model.compile, replace(config, model=replace(model, compile=False, fsdp_config=fsdp))
    source = _source(config)
    is_packed = assemble.per_document_reason(config.model, source, max_length=config.data.max_length) is None
    require_divided(num_ranks, model.ulysses_sequence_parallel_size)
    assemble.require_splittable(model, source, max_length=config.data.max_length)
    data = replace(config.data, max_token_len_per_gpu=config.max_micro_batch_tokens)
    num_data_ranks = num_ranks // model.ulysses_sequence_parallel_size
    workload = heaviest_workload(data, num_data_ranks, is_packed=is_packed)
    return Job(config, source, num_ranks, is_cuda, is_packed, is_compiled, workload)


def _source(config: Config) -> ModelSource:
    """Where config.json is: of a Hub id no weights are fetched."""
    model = config.model
    if model.partial_pretrain == QUICKSTART:
        return resolve_source(config)
    return source_at(config, find_architecture(model.partial_pretrain), random_weights=True)


def _are_alike(model: PreTrainedModel, layers: list[nn.Module]) -> bool:
    kinds = {(type(layer), *((n, p.shape, p.requires_grad) for n, p in layer.named_parameters())) for layer in layers}
    return len(kinds) == 1 and len(set(getattr(model.config, "layer_types", None) or [""])) == 1
