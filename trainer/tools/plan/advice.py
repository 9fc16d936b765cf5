"""The smallest change of a configuration that makes it fit."""

import math
from collections.abc import Callable, Iterator

from trainer.config import MAX_TOKENS, OFFLOAD, RECOMPUTE, Config
from trainer.tools.plan.memory import Change, MemoryPlan

MAX_RANKS = 512
RECOMPUTED = f"{RECOMPUTE}=true"
PUT_AWAY = f"{RECOMPUTE}={OFFLOAD}"
STATE_ON_HOST = "model.fsdp_config.cpu_offload=true"


def smallest_change(
    config: Config, plan: Callable[[Change], MemoryPlan], now: MemoryPlan, limit_gib: float
) -> Change | None:
    """Return the first change that fits, in the order of `change_series`; None if none does."""

    def fits(change: Change) -> bool:
        return plan(change).needed_gib <= limit_gib

    for series in change_series(config, now):
        if fits(series[-1]):  # within a series each change takes less memory than the one before
            return next(change for change in series if fits(change))
    return None


def change_series(config: Config, now: MemoryPlan) -> Iterator[list[Change]]:
    """Yield changes to try, each series from the least to the most: shorter micro-batches,
    recomputed activations, both, layer inputs in host memory; more ranks, without and with both;
    parameters and optimizer state in host memory, without and with both.
    """
    here = now.num_ranks
    max_length = config.data.max_length
    sharing = config.model.ulysses_sequence_parallel_size
    num_documents = math.ceil(now.workload.num_tokens / max_length)
    shorter = [
        f"{MAX_TOKENS}={math.ceil(number * max_length / sharing)}"
        for number in reversed(range(1, num_documents))
    ]
    is_recomputed = config.model.enable_gradient_checkpointing in (True, OFFLOAD)
    recompute = () if is_recomputed else (RECOMPUTED,)
    both = (*recompute, *shorter[-1:])
    divisor = math.lcm(max(1, config.model.fsdp_config.fsdp_size), sharing)
    powers_of_2 = (2**exponent for exponent in range(1, MAX_RANKS.bit_length()))
    more_ranks = [n for n in powers_of_2 if n > here and n % divisor == 0]

    found = [
        [Change(here, (word,)) for word in shorter],
        [Change(here, recompute)],
        [Change(here, (*recompute, word)) for word in shorter],
        [Change(here, (PUT_AWAY,))],
        [Change(n) for n in more_ranks],
        [Change(n, both) for n in more_ranks],
        [Change(here, (STATE_ON_HOST,))],
        [Change(here, (STATE_ON_HOST, *recompute))],
        [Change(here, (STATE_ON_HOST, *both))],
    ]
    on_cpu = {PUT_AWAY, STATE_ON_HOST}  # the host memory is the device's there
    for series in found:
        is_possible = now.is_cuda or not any(on_cpu & set(change.overrides) for change in series)
        if series and is_possible:
            yield series
