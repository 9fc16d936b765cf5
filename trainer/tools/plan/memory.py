"""Plans the memory of each rank from a step on fake tensors."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.config import AUTO, Config, ConfigError, DataConfig
from trainer.model import assemble, expert_exchange
from trainer.model.adapter_names import is_adapter
from trainer.model.experts import experts_of
from trainer.model.nf4 import num_weights
from trainer.model.packed_lm import decoder_layers
from trainer.model.pretrained import ModelSource
from trainer.model.source import find_architecture
from trainer.runtime.distributed import compute_dtype, mesh_dimensions, require_sizes
from trainer.runtime.environment import pinned_bytes
from trainer.tools.plan.fake_step import (
    ALL,
    DEVICE,
    FEWEST_LAYERS,
    HOST,
    Job,
    Measured,
    Workload,
    measure,
)
from trainer.tools.plan.live_storage import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    GRADIENTS,
    HEAD,
    HOST_INPUTS,
    OPTIMIZER,
    PARAMETERS,
    SHARDED_GRADIENTS,
    Peaks,
)
from trainer.train.start.compose import with_words
from trainer.train.start.inputs import source_at

GIB = 2**30
SAVE_COPY = "copy of an asynchronous save"
NAMES = (
    PARAMETERS,
    FROZEN,
    OPTIMIZER,
    SHARDED_GRADIENTS,
    GRADIENTS,
    GATHERED,
    ACTIVATIONS,
    HOST_INPUTS,
    HEAD,
)
DEFAULT_GPU_GIB = 80.0
RANKS_PER_MACHINE = 8
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Estimates for a GPU, not measured: CUDA's context and cuBLAS's buffers; NCCL's buffers for every
# doubling of the ranks of a machine; the share that the allocator loses between blocks.
CUDA_OUTSIDE_GIB = 1.5
NCCL_GIB_PER_DOUBLING = 0.5
CUDA_GAPS = 0.05
# Estimates for a CPU: a process that has imported torch and transformers; the share of gloo, the C
# library and kernels (measured for small models: benchmarks/results/memory_plan.json).
CPU_OUTSIDE_GIB = 0.75
CPU_GAPS = 0.5


@dataclass(frozen=True)
class Change:
    """A different number of ranks, or additional overrides, for a plan."""

    num_ranks: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank by category at the memory peak of a step, on its device and in host
    memory. `saved_bytes` is the size of the rank's shards in a checkpoint.
    """

    job: Job
    num_parameters: int
    num_trained: int
    num_base: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    saved_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors of the step on the device."""
        return sum(self.device_bytes.values())

    @property
    def outside_gib(self) -> float:
        """Estimated memory for everything except the tensors of the step."""
        tensors_gib = self.peak_bytes / GIB
        if not self.job.is_cuda:
            return CPU_OUTSIDE_GIB + CPU_GAPS * tensors_gib
        nccl_gib = NCCL_GIB_PER_DOUBLING * math.log2(self.num_ranks_per_machine)
        return CUDA_OUTSIDE_GIB + nccl_gib + CUDA_GAPS * tensors_gib

    @property
    def num_ranks_per_machine(self) -> int:
        return min(self.job.num_ranks, RANKS_PER_MACHINE)

    @property
    def host_gib(self) -> float:
        return sum(self.host_bytes.values()) / GIB

    @property
    def needed_gib(self) -> float:
        """Memory that a rank needs; without a GPU, host memory counts too."""
        on_device_gib = self.peak_bytes / GIB + self.outside_gib
        return on_device_gib if self.job.is_cuda else on_device_gib + self.host_gib


def planner(config: Config) -> Callable[[Change], MemoryPlan]:
    """Return a function that plans the configuration with a change, once for each change."""

    @cache
    def plan(change: Change) -> MemoryPlan:
        words = " ".join([f"{change.num_ranks} ranks", *change.overrides])
        print(f"planning {words} ...", file=sys.stderr, flush=True)
        return plan_memory(with_words(config, change.overrides), change.num_ranks)

    return plan


def plan_memory(config: Config, num_ranks: int) -> MemoryPlan:
    """Plan rank 0, which holds the largest shards. Raises `ConfigError` if the step cannot be
    planned.

    If the model has more than five equal layers, the step runs with four and with five of them.
    Each additional layer adds as much to a phase as the fifth.
    """
    job = _job(config, num_ranks)
    try:
        model = job.design.model
        layers = decoder_layers(model)
        measured = [len(layers)]
        if len(layers) > FEWEST_LAYERS + 1 and _are_alike(model, layers):
            measured = [FEWEST_LAYERS, FEWEST_LAYERS + 1]
        steps = [measure(job, num_layers) for num_layers in measured]
        step = extrapolated(steps[0], steps[-1], len(layers) - measured[0])
        return _plan(job, step)
    except ConfigError:
        raise
    except Exception as error:  # a model's code may fail in any way on fake tensors
        cause = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.partial_pretrain={config.model.partial_pretrain}: a step of this model cannot "
            f"be planned ({type(error).__name__}: {cause}).\n"
            "Fix: train with trainer.total_training_steps=3, and read memory/max_reserved_gib in "
            "metrics.jsonl"
        ) from error


def extrapolated(few: Measured, more: Measured, num_between: int) -> Measured:
    """Add `num_between` times the difference between `more` and `few` to `few`. `more` has one more
    layer than `few`.
    """

    def grown(a: Counter[str], b: Counter[str]) -> Counter[str]:
        return Counter({name: a[name] + (b[name] - a[name]) * num_between for name in a | b})

    return {
        where: {phase: grown(held, more[where][phase]) for phase, held in peaks.items()}
        for where, peaks in few.items()
    }


def heaviest_workload(data: DataConfig, num_ranks: int, *, is_packed: bool) -> Workload:
    """Return micro-batches as full as their limits and the rank's part of the batch allow.

    All documents have `max_length` tokens. If the cost of a sample is linear in its length, no rank
    gets more work than this.
    """
    max_samples: float = math.ceil(data.train_batch_size / num_ranks)
    if not is_packed:
        max_samples = 1
    elif data.micro_batch_size_per_gpu is not None:
        max_samples = min(max_samples, data.micro_batch_size_per_gpu)
    max_tokens = data.max_token_len_per_gpu or math.inf
    num_tokens = int(min(max_tokens, max_samples * data.max_length))
    num_whole, rest = divmod(num_tokens, data.max_length)
    seqlens = (data.max_length,) * num_whole + ((rest,) if rest else ())
    num_micro_batches = math.ceil(math.ceil(data.train_batch_size / num_whole) / num_ranks)
    return Workload(seqlens, num_micro_batches)


def _plan(job: Job, measured: Measured) -> MemoryPlan:
    """Make the plan from a measured step: the peak on the device, and the host memory."""
    device = max(measured[DEVICE].values(), key=lambda held: held.total())
    always_shown = set(NAMES) - {HOST_INPUTS, FROZEN}
    saved_names = {PARAMETERS, OPTIMIZER, FROZEN}
    if job.config.model.has_adapters:  # the shards of adapters do not hold the base model
        saved_names.remove(FROZEN)
    saved = sum(_most(measured[ALL], name) for name in saved_names)
    host = {name: _most(measured[HOST], name) for name in NAMES if name in job.elsewhere}
    host = {name: size_bytes for name, size_bytes in host.items() if size_bytes}
    if SHARDED_GRADIENTS in host:
        host[SHARDED_GRADIENTS] = _pinned_gradient_bytes(job)
    host[SAVE_COPY] = saved if job.config.trainer.checkpoint.async_save else 0
    named = dict(job.design.model.named_parameters())
    parameters = list(named.values())
    return MemoryPlan(
        job=job,
        num_parameters=sum(map(num_weights, parameters)),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        num_base=sum(num_weights(p) for name, p in named.items() if not is_adapter(name)),
        device_bytes={n: device[n] for n in NAMES if n in always_shown or device[n]},
        host_bytes=host,
        saved_bytes=saved,
    )


def _most(peaks: Peaks, name: str) -> int:
    return max(held[name] for held in peaks.values())


def _pinned_gradient_bytes(job: Job) -> int:
    """Return the bytes of the float32 gradients that FSDP copies to page-locked memory.

    Each gradient has its own block there. In the fake step, the gradients of a layer are parts of
    one tensor instead.
    """
    fsdp_size = job.config.model.fsdp_config.fsdp_size
    num_shards = mesh_dimensions(job.num_ranks, fsdp_size=fsdp_size)["fsdp"]
    trained = [p.shape for p in job.design.model.parameters() if p.requires_grad]
    return sum(
        pinned_bytes(4 * math.ceil(shape[0] / num_shards) * math.prod(shape[1:]))
        for shape in trained
    )


def _job(config: Config, num_ranks: int) -> Job:
    """Resolve the settings that depend on the machine; assume a GPU unless `trainer.device=cpu`.

    Compiled layers are planned like uncompiled ones, which need more memory.
    """
    model = config.model
    is_cuda = config.trainer.device != "cpu"
    fsdp = model.fsdp_config
    if is_cuda and fsdp.param_dtype == AUTO:
        has_gpu = torch.cuda.is_available()
        dtype = compute_dtype(AUTO, torch.device("cuda")) if has_gpu else torch.bfloat16
        fsdp = replace(fsdp, param_dtype=str(dtype).removeprefix("torch."))
    config = replace(config, model=replace(model, compile=False, fsdp_config=fsdp))
    source = source_of(config)
    design = assemble.design_model(config.model, source, max_length=config.data.max_length)
    require_ranks(design, num_ranks)
    data = replace(config.data, max_token_len_per_gpu=config.max_micro_batch_tokens)
    num_data_ranks = num_ranks // model.ulysses_sequence_parallel_size
    return Job(
        config=config,
        design=design,
        num_ranks=num_ranks,
        is_cuda=is_cuda,
        workload=heaviest_workload(data, num_data_ranks, is_packed=design.reason is None),
    )


def require_ranks(design: assemble.Design, num_ranks: int) -> None:
    """Raise `ConfigError` unless this number of ranks can train the model."""
    model = design.config
    fsdp_size = model.fsdp_config.fsdp_size
    expert_size = model.expert_parallel_size
    require_sizes(
        num_ranks,
        fsdp_size=fsdp_size,
        sequence_size=model.ulysses_sequence_parallel_size,
        expert_size=expert_size,
    )
    if expert_size > 1:
        num_shards = mesh_dimensions(num_ranks, fsdp_size=fsdp_size)["fsdp"]
        expert_exchange.require_even(experts_of(design.model), num_shards, expert_size=expert_size)


def source_of(config: Config) -> ModelSource:
    """Return the model source with config.json only; no weights are downloaded."""
    directory = find_architecture(config.model.partial_pretrain)
    return source_at(config, directory, random_weights=True)


def _are_alike(model: PreTrainedModel, layers: list[nn.Module]) -> bool:
    """Return True if all layers have the same parameters and the same kind of attention."""

    def kind(layer: nn.Module) -> tuple[object, ...]:
        return type(layer), *(
            (name, p.shape, p.requires_grad) for name, p in layer.named_parameters()
        )

    layer_types = getattr(model.config, "layer_types", None) or [""]
    return len({kind(layer) for layer in layers}) == 1 and len(set(layer_types)) == 1


def default_memory_gib(config: Config, num_ranks: int) -> float:
    """Return the memory of the smallest GPU that `num_ranks` would use here, or on CPUs a rank's
    share of the host memory.

    This is the GPU's total memory, not its free memory, because other processes come and go.
    """
    if config.trainer.device == "cpu":
        return host_memory_bytes() / num_ranks / GIB
    num_cards = min(num_ranks, torch.cuda.device_count())
    cards = [torch.cuda.get_device_properties(number) for number in range(num_cards)]
    return min((card.total_memory / GIB for card in cards), default=DEFAULT_GPU_GIB)


def host_memory_bytes() -> int:
    """Return the memory that this process may use: the machine's memory or its container's limit,
    whichever is smaller.
    """
    sizes = [psutil.virtual_memory().total]
    with suppress(OSError, ValueError):  # no file, or no limit: "max"
        sizes.append(int(CONTAINER_LIMIT.read_text(encoding="utf-8")))
    return min(sizes)
