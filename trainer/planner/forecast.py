"""Whether a run fits its memory, and the smallest change that makes it fit (floor 5).

torch is imported only by what plans.
"""

import math
import sys
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from trainer.config import MAX_TOKENS, OFFLOAD, RECOMPUTE, Config, ConfigError
from trainer.launch.memory_kills import MemoryKills
from trainer.planner.roofline import RANKS_PER_MACHINE
from trainer.run.compose import with_words
from trainer.runtime.environment import uncollected

if TYPE_CHECKING:
    from trainer.planner.memory_plan import MemoryPlan

GIB = 2**30
DEFAULT_GPU_GIB = 80.0
MAX_RANKS = 512
CUDA_OUTSIDE_GIB, NCCL_GIB_PER_DOUBLING, CUDA_GAPS = 1.5, 0.5, 0.05
"""Estimates, not measured: CUDA's context and cuBLAS's buffers; NCCL's, with every doubling of the ranks of a machine;
what the allocator loses between blocks."""
CPU_OUTSIDE_GIB, CPU_GAPS = 0.75, 0.5
"""A process that has imported torch and transformers; what gloo, the C library and kernels take besides (measured for
small models: benchmarks/results/memory_plan.json)."""
RECOMPUTED, PUT_AWAY = f"{RECOMPUTE}=true", f"{RECOMPUTE}={OFFLOAD}"
STATE_ON_HOST = "model.fsdp_config.cpu_offload=true"


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
        return min(self.plan.num_ranks, RANKS_PER_MACHINE)

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


def default_memory_gib(config: Config, num_ranks: int) -> float:
    """Of the smallest of the cards that `num_ranks` take here, on this machine, or a rank's share of the host memory
    that there may be used.

    All of a card's: what others hold of it changes from moment to moment, and `doctor` warns of them.
    """
    if config.trainer.device == "cpu":
        return MemoryKills().usable_bytes / num_ranks / GIB
    import torch

    cards = range(min(num_ranks, torch.cuda.device_count())) if torch.cuda.is_available() else ()
    sizes_gib = (torch.cuda.get_device_properties(card).total_memory / GIB for card in cards)
    return min(sizes_gib, default=DEFAULT_GPU_GIB)


def forecaster(config: Config, memory_gib: float) -> Callable[[Change], Forecast]:
    """A function that plans the configuration with a change; each is planned once. Raises `ConfigError`."""

    @cache
    def forecast(change: Change) -> Forecast:
        words = " ".join([f"{change.num_ranks} ranks", *change.overrides])
        print(f"planning {words} ...", file=sys.stderr, flush=True)
        with uncollected():
            from trainer.planner.memory_plan import plan_memory
        try:
            plan = plan_memory(with_words(config, change.overrides), change.num_ranks)
        except ConfigError:
            raise
        except Exception as error:  # whatever a model's own code does with tensors that have no memory
            raise _not_planned(config, error) from error
        return Forecast(plan, memory_gib, is_cuda=config.trainer.device != "cpu")

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
        if series and forecast(series[-1]).fits:  # within a series each takes less memory than the one before
            return series[bisect_left(series, True, hi=len(series) - 1, key=lambda change: forecast(change).fits)]
    return None


def change_series(config: Config, plan: "MemoryPlan") -> Iterator[list[Change]]:
    """What to try, each series from the least to the most: shorter micro-batches, recomputed activations, both, their
    inputs put away; more ranks, without and with both; parameters and optimizer state in host memory, likewise.
    """
    now, max_length = plan.num_ranks, config.data.max_length
    budgets = [number * max_length for number in reversed(range(1, -(-plan.workload.num_tokens // max_length)))]
    sharing = config.model.ulysses_sequence_parallel_size
    shorter = [f"{MAX_TOKENS}={-(-tokens // sharing)}" for tokens in budgets]
    how, is_cuda = config.model.enable_gradient_checkpointing, config.trainer.device != "cpu"
    recompute = [] if how in (True, OFFLOAD) else [RECOMPUTED]
    both = (*recompute, *shorter[-1:])
    yield [Change(now, (word,)) for word in shorter]
    yield [Change(now, (word,)) for word in recompute]
    yield [Change(now, (*recompute, word)) for word in shorter]
    if is_cuda and how != OFFLOAD:
        yield [Change(now, (PUT_AWAY,))]
    divisor = math.lcm(max(1, config.model.fsdp_config.fsdp_size), sharing)
    more = [ranks for ranks in (2**n for n in range(1, MAX_RANKS.bit_length())) if ranks > now and ranks % divisor == 0]
    yield [Change(ranks) for ranks in more]
    yield [Change(ranks, both) for ranks in more if both]
    if is_cuda and not config.model.fsdp_config.cpu_offload:
        yield [Change(now, (STATE_ON_HOST,))]
        yield [Change(now, (STATE_ON_HOST, *recompute))]
        yield [Change(now, (STATE_ON_HOST, *both))]
