"""Whether a run fits, before anything is rented: `python -m trainer.cli.plan [N] [key=value ...]` (floor 5).

Needs config.json of the model, no weights, no GPU and no data. Exit codes: 0 fits, 1 does not, 2 wrong usage or
configuration. torch is imported only once the configuration is known to be right.
"""

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from trainer.__main__ import load_config
from trainer.cli.arguments import Parser
from trainer.config import QUICKSTART, Config, ConfigError
from trainer.errors import EXIT_USAGE
from trainer.launch.launcher import UsageError, choose_num_ranks, count_gpus, parse_arguments
from trainer.model.source import find_architecture

if TYPE_CHECKING:
    from trainer.planner.memory_plan import MemoryPlan

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
GIB = 2**30
DEFAULT_GPU_GIB = 80.0
MAX_RANKS = 512
NAME_WIDTH = 44
CUDA_OUTSIDE_GIB, NCCL_GIB_PER_DOUBLING, CUDA_GAPS = 1.5, 0.5, 0.05
"""Estimates, not measured: CUDA's context and cuBLAS's buffers; NCCL's, with every doubling of the ranks of a machine;
what the allocator loses between blocks."""
MAX_RANKS_PER_MACHINE = 8
CPU_OUTSIDE_GIB, CPU_GAPS = 0.75, 0.5
"""A process that has imported torch and transformers; what gloo, the C library and kernels take besides (measured for
small models: benchmarks/results/memory_plan.json)."""
MAX_TOKENS, RECOMPUTE = "data.max_token_len_per_gpu", "model.enable_gradient_checkpointing=true"
OFFLOAD = "model.fsdp_config.cpu_offload=true"


@dataclass(frozen=True)
class Change:
    """What to run instead: on so many ranks, with these words behind the command."""

    num_ranks: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """A plan beside the memory it has to fit."""

    plan: "MemoryPlan"
    memory_gib: float
    is_cuda: bool

    @property
    def outside_gib(self) -> float:
        """What is no tensor of the step."""
        if not self.is_cuda:
            return CPU_OUTSIDE_GIB + CPU_GAPS * self.plan.peak_bytes / GIB
        nccl_gib = NCCL_GIB_PER_DOUBLING * math.log2(self.num_ranks_per_machine)
        return CUDA_OUTSIDE_GIB + nccl_gib + CUDA_GAPS * self.plan.peak_bytes / GIB

    @property
    def num_ranks_per_machine(self) -> int:
        return min(self.plan.num_ranks, MAX_RANKS_PER_MACHINE)

    @property
    def host_gib(self) -> float:
        return sum(self.plan.host_bytes.values()) / GIB

    @property
    def needed_gib(self) -> float:
        """On a CPU the device is the host."""
        return self.plan.peak_bytes / GIB + self.outside_gib + (0.0 if self.is_cuda else self.host_gib)

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.memory_gib


def main(argv: list[str]) -> int:
    try:
        words, memory_gib = _parse(argv)
        asked = parse_arguments(words)
        config = load_config(asked.overrides)
        if config.model.partial_pretrain != QUICKSTART:
            find_architecture(config.model.partial_pretrain)
        num_gpus = 0 if config.trainer.device == "cpu" else count_gpus()
        num_ranks = asked.num_ranks or choose_num_ranks(None, num_gpus=num_gpus)
        memory_gib = memory_gib or default_memory_gib(config, num_ranks)
        forecast = forecaster(asked.overrides, memory_gib)
        found = forecast(Change(num_ranks))
        print("\n".join(table(found, config)))
        if found.fits:
            print(f"fits: {found.needed_gib:.1f} of {memory_gib:.1f} GiB")
            return EXIT_FITS
        change = smallest_change(config, found.plan, forecast)
    except (ConfigError, UsageError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(f"does not fit: {found.needed_gib:.1f} of {memory_gib:.1f} GiB; {_advice(change, num_ranks, forecast)}")
    return EXIT_DOES_NOT_FIT


def _parse(argv: list[str]) -> tuple[list[str], float | None]:
    """(N and overrides, `--memory-gib`). Raises `ConfigError`."""
    parser = Parser(
        prog="python -m trainer.cli.plan",
        usage="%(prog)s [N] [key=value ...] [--memory-gib X]",
        description="Predict the peak memory of each rank, and name the smallest change that fits.",
        allow_abbrev=False,
    )
    about = "N: ranks on all machines together (default: the number of GPUs, else 2); then any key of conf/sft.yaml"
    parser.add_argument("words", nargs="*", metavar="N, key=value", help=about)
    about = f"memory of one GPU in GiB (default: that of the local GPU, else {DEFAULT_GPU_GIB:.0f}); with "
    about += "trainer.device=cpu a rank's share of this machine's"
    parser.add_argument("--memory-gib", type=float, metavar="X", help=about)
    known = parser.parse_intermixed_args(argv)
    if known.memory_gib is not None and not known.memory_gib > 0:
        raise ConfigError(f"--memory-gib must be positive, got {known.memory_gib}")
    return known.words, known.memory_gib


def default_memory_gib(config: Config, num_ranks: int) -> float:
    if config.trainer.device == "cpu":
        return psutil.virtual_memory().total / num_ranks / GIB
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else DEFAULT_GPU_GIB


def forecaster(overrides: list[str], memory_gib: float) -> Callable[[Change], Forecast]:
    """A function that plans the command with a change; each is planned once. Raises `ConfigError`."""
    from trainer.planner.memory_plan import plan_memory

    known: dict[Change, Forecast] = {}

    def forecast(change: Change) -> Forecast:
        if change not in known:
            print(f"planning {' '.join(_words(change))} ...", file=sys.stderr, flush=True)
            config = load_config([*overrides, *change.overrides])
            try:
                plan = plan_memory(config, change.num_ranks)
            except ConfigError:
                raise
            except Exception as error:  # whatever a model's own code does with tensors that have no memory
                raise _not_planned(config, error) from error
            known[change] = Forecast(plan, memory_gib, is_cuda=config.trainer.device != "cpu")
        return known[change]

    return forecast


def _not_planned(config: Config, error: Exception) -> ConfigError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    cause = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"model.partial_pretrain={config.model.partial_pretrain}: its step cannot be planned "
        f"({type(error).__name__}: {cause}; {place.filename}:{place.lineno}). Measure it: train with "
        "trainer.total_training_steps=3 and read memory/max_reserved_gib in metrics.jsonl"
    )


def smallest_change(config: Config, plan: "MemoryPlan", forecast: Callable[[Change], Forecast]) -> Change | None:
    """The first change that fits, in the order of `change_series`; None if none does."""
    for series in change_series(config, plan):
        if not series or not forecast(series[-1]).fits:
            continue
        first, last = 0, len(series) - 1
        while first < last:  # within a series each change takes less memory than the one before
            middle = (first + last) // 2
            first, last = (first, middle) if forecast(series[middle]).fits else (middle + 1, last)
        return series[first]
    return None


def change_series(config: Config, plan: "MemoryPlan") -> Iterator[list[Change]]:
    """What to try, each series from the least to the most: shorter micro-batches, recomputed activations, both; more
    ranks, without and with both; parameters and optimizer state in host memory, likewise.
    """
    now, max_length = plan.num_ranks, config.data.max_length
    budgets = [number * max_length for number in reversed(range(1, -(-plan.workload.num_tokens // max_length)))]
    shorter = [f"{MAX_TOKENS}={tokens}" for tokens in budgets]
    recompute = [] if config.model.enable_gradient_checkpointing is True else [RECOMPUTE]
    both = (*recompute, *shorter[-1:])
    yield [Change(now, (word,)) for word in shorter]
    yield [Change(now, (word,)) for word in recompute]
    yield [Change(now, (*recompute, word)) for word in shorter]
    divisor = max(1, config.model.fsdp_config.fsdp_size)
    more = [ranks for ranks in (2**n for n in range(1, MAX_RANKS.bit_length())) if ranks > now and ranks % divisor == 0]
    yield [Change(ranks) for ranks in more]
    yield [Change(ranks, both) for ranks in more if both]
    if config.trainer.device != "cpu" and not config.model.fsdp_config.cpu_offload:
        yield [Change(now, (OFFLOAD,))]
        yield [Change(now, (OFFLOAD, *recompute))]
        yield [Change(now, (OFFLOAD, *both))]


def table(forecast: Forecast, config: Config) -> Iterator[str]:
    """Bytes of one rank in GiB: the device's column, and the host's where that is other memory."""
    plan, is_cuda = forecast.plan, forecast.is_cuda
    measured = " and ".join(map(str, plan.num_measured_layers))
    yield (
        f"{config.model.partial_pretrain}: {plan.num_parameters / 1e9:.3g} B parameters, {plan.num_layers} layers "
        f"(a step measured on {measured}), {plan.num_ranks} ranks"
    )
    load = plan.workload
    yield (
        f"micro-batch: up to {load.num_tokens:,} tokens, {len(load.seqlens)} documents of up to {max(load.seqlens):,}; "
        f"{load.num_micro_batches} a step at most"
    )
    yield (
        f"a rank receives {plan.gathered_bytes / GIB:.2f} GiB of parameters a step and sends "
        f"{plan.reduced_bytes / GIB:.2f} GiB of gradients"
    )
    columns = ("GPU", "host") if is_cuda else ("CPU",)
    yield f"{'GiB per rank':{NAME_WIDTH}}" + "".join(f"{column:>8}" for column in columns)
    outside = "CUDA, NCCL, gaps between blocks (estimate)" if is_cuda else "Python and its libraries (estimate)"
    device = {name: size_bytes / GIB for name, size_bytes in plan.device_bytes.items()} | {
        outside: forecast.outside_gib
    }
    host = {name: size_bytes / GIB for name, size_bytes in plan.host_bytes.items()}
    if not is_cuda:
        device, host = device | host, {}
    for name in device | host:
        cells = [f"{held[name]:8.2f}" if name in held else " " * 8 for held in (device, host)]
        yield f"{name:{NAME_WIDTH}}{''.join(cells)}".rstrip()
    sums = [f"{sum(held.values()):8.2f}" for held in (device, host)[: len(columns)]]
    yield f"{'together':{NAME_WIDTH}}{''.join(sums)}"
    if is_cuda:
        num_ranks = forecast.num_ranks_per_machine
        yield f"host memory on a machine with {num_ranks} of these ranks: {num_ranks * forecast.host_gib:.2f} GiB"


def _words(change: Change) -> list[str]:
    return [f"{change.num_ranks} ranks", *change.overrides]


def _advice(change: Change | None, num_ranks: int, forecast: Callable[[Change], Forecast]) -> str:
    if change is None:
        return "nor does anything tried"
    ranks = [f"on {change.num_ranks} ranks"] if change.num_ranks != num_ranks else []
    return f"this does, with {forecast(change).needed_gib:.1f} GiB: {' '.join([*ranks, *change.overrides])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
