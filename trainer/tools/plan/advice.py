"""Finds the smallest change to a configuration that makes it fit."""

import math
from collections.abc import Callable, Iterator

from trainer.config import MAX_TOKENS, OFFLOAD, RECOMPUTE, Config, ConfigError
from trainer.tools.plan.memory import Change, MemoryPlan, require_ranks

MAX_RANKS = 512
STATE_ON_HOST = "model.fsdp_config.cpu_offload=true"


def smallest_change(
    config: Config,
    plan: Callable[[Change], MemoryPlan],
    now: MemoryPlan,
    limit_gib: float,
) -> Change | None:
    """Return the first change of `change_series` that fits, or None."""
    for series in change_series(config, now):
        # each change of a series needs less memory than the one before
        if series and plan(series[-1]).needed_gib <= limit_gib:
            return next(change for change in series if plan(change).needed_gib <= limit_gib)
    return None


def change_series(config: Config, now: MemoryPlan) -> Iterator[list[Change]]:
    """Yield the changes to try, each series from the smallest change to the largest.

    The order: shorter micro-batches; recomputation; shorter micro-batches with recomputation; layer
    inputs in host memory. Then more ranks, with and without shorter micro-batches and
    recomputation. Then parameters and optimizer state in host memory: without other changes, with
    recomputation, and with recomputation and shorter micro-batches.
    """
    here = now.job.num_ranks
    model = config.model
    max_length = config.data.max_length
    num_documents = len(now.job.workload.seqlens)
    shorter = [
        f"{MAX_TOKENS}={math.ceil(number * max_length / model.ulysses_sequence_parallel_size)}"
        for number in reversed(range(1, num_documents))
    ]
    is_recomputed = model.enable_gradient_checkpointing in (True, OFFLOAD)
    recompute = () if is_recomputed else (f"{RECOMPUTE}=true",)
    both = (*recompute, *shorter[-1:])
    powers_of_2 = (2**exponent for exponent in range(1, MAX_RANKS.bit_length()))
    more_ranks = [n for n in powers_of_2 if n > here and _is_possible(n, now)]
    yield [Change(here, (word,)) for word in shorter]
    yield [Change(here, recompute)]
    yield [Change(here, (*recompute, word)) for word in shorter]
    if now.job.is_cuda:
        yield [Change(here, (f"{RECOMPUTE}={OFFLOAD}",))]
    yield [Change(n) for n in more_ranks]
    yield [Change(n, both) for n in more_ranks]
    # a configuration with both expert parallelism and offloaded state is refused
    if now.job.is_cuda and model.expert_parallel_size == 1:
        for more in ((), recompute, both):
            yield [Change(here, (STATE_ON_HOST, *more))]


def _is_possible(num_ranks: int, now: MemoryPlan) -> bool:
    try:
        require_ranks(now.job.design, num_ranks)
    except ConfigError:
        return False
    return True
