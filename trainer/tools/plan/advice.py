"""The smallest change of a configuration that makes it fit (floor 5)."""

import math
from bisect import bisect_left
from collections.abc import Iterator

from trainer.config import MAX_TOKENS, OFFLOAD, RECOMPUTE, Config
from trainer.tools.plan.memory import Change, MemoryPlan, Planner

MAX_RANKS = 512
RECOMPUTED = f"{RECOMPUTE}=true"
PUT_AWAY = f"{RECOMPUTE}={OFFLOAD}"
STATE_ON_HOST = "model.fsdp_config.cpu_offload=true"


def smallest_change(
    config: Config, plan: Planner, now: MemoryPlan, limit_gib: float
) -> Change | None:
    """The first change that fits, in the order of `change_series`; None if none does."""

    def fits(change: Change) -> bool:
        return plan(change).needed_gib <= limit_gib

    for series in change_series(config, now):
        if fits(series[-1]):  # within a series each change takes less memory than the one before
            return series[bisect_left(series, True, hi=len(series) - 1, key=fits)]
    return None


def change_series(config: Config, now: MemoryPlan) -> Iterator[list[Change]]:
    """Changes to try, each series from the least to the most: shorter micro-batches, recomputed
    activations, both, layer inputs in host memory; more ranks, without and with both; parameters
    and optimizer state in host memory, without and with both.
    """
    num_ranks = now.num_ranks
    max_length = config.data.max_length
    sharing = config.model.ulysses_sequence_parallel_size
    how = config.model.enable_gradient_checkpointing
    num_documents = math.ceil(now.workload.num_tokens / max_length)
    shorter = [
        f"{MAX_TOKENS}={math.ceil(number * max_length / sharing)}"
        for number in reversed(range(1, num_documents))
    ]
    recompute = [] if how in (True, OFFLOAD) else [RECOMPUTED]
    both = (*recompute, *shorter[-1:])
    divisor = math.lcm(max(1, config.model.fsdp_config.fsdp_size), sharing)
    powers_of_2 = [2**exponent for exponent in range(1, MAX_RANKS.bit_length())]
    more_ranks = [n for n in powers_of_2 if n > num_ranks and n % divisor == 0]

    found = [
        [Change(num_ranks, (word,)) for word in shorter],
        [Change(num_ranks, (word,)) for word in recompute],
        [Change(num_ranks, (*recompute, word)) for word in shorter],
    ]
    if now.is_cuda and how != OFFLOAD:
        found.append([Change(num_ranks, (PUT_AWAY,))])
    found.append([Change(n) for n in more_ranks])
    if both:
        found.append([Change(n, both) for n in more_ranks])
    if now.is_cuda and not config.model.fsdp_config.cpu_offload:
        found.append([Change(num_ranks, (STATE_ON_HOST,))])
        found.append([Change(num_ranks, (STATE_ON_HOST, *recompute))])
        found.append([Change(num_ranks, (STATE_ON_HOST, *both))])
    return iter(series for series in found if series)
