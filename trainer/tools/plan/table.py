"""Format a memory plan as a table."""

from collections.abc import Iterator

from trainer.config import Config
from trainer.model.packed_lm import decoder_layers
from trainer.tools.plan.memory import GIB, MemoryPlan

NAME_WIDTH = 44


def memory_lines(plan: MemoryPlan, config: Config) -> Iterator[str]:
    """Yield the table's lines: a rank's GiB by category, on its device and in host memory."""
    num_layers = len(decoder_layers(plan.job.design.model))
    num_parameters = f"{plan.num_parameters / 1e9:.3g} B parameters"
    if plan.num_trained < plan.num_parameters:
        num_parameters += f", {plan.num_trained / 1e9:.3g} B trained"
    yield (
        f"{config.model.partial_pretrain}: {num_parameters}, {num_layers} layers, "
        f"{plan.job.num_ranks} ranks"
    )
    load = plan.job.workload
    yield (
        f"micro-batch: up to {load.num_tokens:,} tokens, {len(load.seqlens)} documents of up to "
        f"{max(load.seqlens):,}; at most {load.num_micro_batches} per step"
    )
    if config.model.expert_parallel_size > 1:
        yield "the plan ignores model.expert_parallel_size: it counts gathered experts"
    device = {name: size_bytes / GIB for name, size_bytes in plan.device_bytes.items()}
    host = {name: size_bytes / GIB for name, size_bytes in plan.host_bytes.items()}
    if plan.job.is_cuda:
        device["CUDA, NCCL, gaps between blocks (estimate)"] = plan.outside_gib
        columns = {"GPU": device, "host": host}
    else:
        device["Python and its libraries (estimate)"] = plan.outside_gib
        columns = {"CPU": device | host}
    yield _row("GiB per rank", list(columns))
    for name in device | host:
        cells = [f"{held[name]:.2f}" if name in held else "" for held in columns.values()]
        yield _row(name, cells)
    yield _row("together", [f"{sum(held.values()):.2f}" for held in columns.values()])
    if plan.job.is_cuda:
        num_ranks = plan.num_ranks_per_machine
        host_gib = num_ranks * plan.host_gib
        yield f"host memory of a machine with {num_ranks} of these ranks: {host_gib:.2f} GiB"


def _row(name: str, cells: list[str]) -> str:
    columns = "".join(f"{cell:>8}" for cell in cells)
    return f"{name:{NAME_WIDTH}}{columns}".rstrip()
