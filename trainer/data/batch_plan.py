"""Decides which rows a step trains, and which rank computes which samples.

All functions here depend only on seed, epoch, lengths and counts, and use no torch.

A keyed permutation decides which row is trained at which place of an epoch. Each step computes it
only for its batch, so no process keeps a list of all rows. The same permutation draws the
validation rows.

A global batch is a set of rows. A row is one sample, or several samples if a conversation is
divided by turns. Epoch, batch and position count such a row as one sample.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainer.config import ConfigError
from trainer.runtime import seeding
from trainer.runtime.progress import Position

NUM_ROUNDS = 16
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class Share:
    """The rows of a source, and how often an epoch trains them. If `repeat` is 2.5, an epoch trains
    each row twice and half of the rows a third time.
    """

    num_rows: int
    repeat: float = 1.0

    @property
    def num_samples(self) -> int:
        """Number of samples in each epoch, rounded half up."""
        return math.floor(self.num_rows * self.repeat + 0.5)


def permuted(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map `places` through the permutation of 0 .. size - 1 that `key` selects; int64.

    The permutation is a Feistel network on pairs (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). The pairs stand for 0 .. size - 1 and at most 2 sqrt(size) more numbers; a
    place that lands on one of those is enciphered again.
    """
    width = math.isqrt(max(size, 1) - 1) + 1
    sizes = (np.uint64(-(-size // width)), np.uint64(width))
    generator = np.random.Generator(np.random.Philox(key))
    keys = generator.integers(0, 2**64, size=NUM_ROUNDS, dtype=np.uint64)
    found = np.array(places, dtype=np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _enciphered(found[outside], sizes, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _enciphered(
    values: np.ndarray, sizes: tuple[np.uint64, np.uint64], keys: np.ndarray
) -> np.ndarray:
    """Apply the network once. `sizes`: the number of values of the first and the second half.

    Each round adds a keyed hash of one half to the other half, modulo its size. Subtracting the
    same hash undoes a round, so all rounds together permute the pairs.
    """
    halves = list(np.divmod(values, sizes[1]))
    for number, key in enumerate(keys):
        changed = number % 2
        halves[changed] = (halves[changed] + _scattered(halves[1 - changed] + key)) % sizes[changed]
    return np.asarray(halves[0] * sizes[1] + halves[1])


def _scattered(values: np.ndarray) -> np.ndarray:
    """Make each of the 64 bits depend on all bits of the value, as the last steps of SplitMix64 do
    (Steele, Lea and Flood 2014).
    """
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> _SHIFTS[2])


def rows_at(
    places: np.ndarray,
    shares: tuple[Share, ...],
    *,
    seed: int,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of the source, row in the source) for each place of an epoch; int64.

    If an epoch trains some rows of a source once more than the others, it takes these rows from a
    fixed permutation of the source, and the next epoch continues where this one stopped. So after
    any epoch, the repeat counts of any two rows of a source differ by at most one.
    """
    bounds = np.cumsum([0, *(share.num_samples for share in shares)])
    slots = permuted(places, int(bounds[-1]), seeding.key("epoch", seed, epoch))
    sources = np.searchsorted(bounds, slots, side="right") - 1
    rows = slots - bounds[sources]
    for number, share in enumerate(shares):
        # A slot below `times * num_rows` belongs to a whole pass over the source. The other
        # `num_more` slots are turns in its fixed permutation, which the next epoch continues.
        times, num_more = divmod(share.num_samples, share.num_rows)
        own = np.flatnonzero(sources == number)
        once_more = own[rows[own] >= times * share.num_rows]
        turns = (rows[once_more] + epoch * num_more) % share.num_rows
        rows[own] %= share.num_rows
        rows[once_more] = permuted(turns, share.num_rows, seeding.key("source", seed, number))
    return sources, rows


def held_out_rows(num_rows: int, val_ratio: float, *, seed: int) -> np.ndarray:
    """Return the rows held out for validation, ascending, int64.

    Of two or more rows, at least one is held out and at least one is kept for training. With a
    ratio of 0, no row is held out.
    """
    if val_ratio <= 0 or num_rows < 2:
        return np.zeros(0, dtype=np.int64)
    count = min(max(1, round(num_rows * val_ratio)), num_rows - 1)
    return np.sort(permuted(np.arange(count), num_rows, seeding.key("split", seed, 0)))


# Steps

START = Position()


@dataclass(frozen=True)
class Limits:
    """Bounds of one micro-batch; `None` = unbounded."""

    max_tokens: int | None
    max_samples: int | None


@dataclass(frozen=True)
class Schedule:
    """The order in which a run trains rows, starting at `start`. Each step trains the next
    `batch_size` rows of its epoch; the last step of an epoch trains the remaining ones.

    A schedule that starts at a position of a previous one continues its order, even with a
    different batch size.
    """

    shares: tuple[Share, ...]
    batch_size: int
    seed: int
    start: Position = START
    order: str = "shuffled"
    """A key of `ORDERS`."""
    lengths: np.ndarray | None = field(
        default=None,
        compare=False,
        repr=False,
    )
    """Number of tokens of each row, int64, for orders that need it."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return sum(share.num_samples for share in self.shares)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def _steps_skipped(self) -> int:
        """Number of steps by which the epoch of `start` is shorter than a full epoch."""
        num_left = max(0, self.num_samples - self.start.samples_consumed)
        return self.steps_per_epoch - math.ceil(num_left / self.batch_size)

    def position(self, step: int) -> Position:
        """Return the position after `step` finished steps. `step` must not be before `start`."""
        start = self.start
        assert step >= start.step
        num_steps = step - start.step
        num_epochs, place = divmod(self._steps_skipped + num_steps, self.steps_per_epoch)
        if num_epochs == 0:
            return Position(step, start.epoch, start.samples_consumed + num_steps * self.batch_size)
        return Position(step, start.epoch + num_epochs, place * self.batch_size)

    def steps_until(self, total_epochs: int) -> int:
        """Return the number of steps of the whole run up to the end of `total_epochs` epochs."""
        num_epochs = total_epochs - self.start.epoch
        return self.start.step + max(0, num_epochs * self.steps_per_epoch - self._steps_skipped)

    def rows(self, step: int) -> np.ndarray:
        """Return the row ids of the global batch of `step` (from 1), int64, in epoch order."""
        position = self.position(step - 1)
        first = position.samples_consumed
        places = np.arange(first, min(first + self.batch_size, self.num_samples))
        return ORDERS[self.order](self, places, position.epoch)

    @cached_property
    def shortest_first(self) -> np.ndarray:
        """Row ids of the first epoch, from the shortest row to the longest, int64. Rows of equal
        length are shuffled.
        """
        assert self.lengths is not None, "this order needs the row lengths"
        ids = shuffled(self, np.arange(self.num_samples), epoch=0)
        return ids[np.argsort(self.lengths[ids], kind="stable")]


def shuffled(schedule: Schedule, places: np.ndarray, epoch: int) -> np.ndarray:
    """Return the row ids at `places` of an epoch, int64. Each epoch has its own permutation."""
    sources, rows = rows_at(places, schedule.shares, seed=schedule.seed, epoch=epoch)
    first_ids = np.cumsum([0, *(share.num_rows for share in schedule.shares)])
    return first_ids[sources] + rows


def short_first_epoch(schedule: Schedule, places: np.ndarray, epoch: int) -> np.ndarray:
    """Return row ids as `shuffled` does, except that the first epoch goes from short to long."""
    return schedule.shortest_first[places] if epoch == 0 else shuffled(schedule, places, epoch)


ORDERS: dict[str, Callable[[Schedule, np.ndarray, int], np.ndarray]] = {
    "shuffled": shuffled,
    "short_first_epoch": short_first_epoch,
}
"""{value of `data.order`: function that maps schedule, places and epoch (from 0) to row ids}. These
functions must be pure, because a resumed run calls them again for the same places.
"""


@dataclass(frozen=True)
class RankPlan:
    """This rank's part of every global batch."""

    data_rank: int
    num_data_ranks: int
    limits: Limits
    quadratic_cost: float
    window_costs: Mapping[int, float] = field(default_factory=dict)
    """{sliding window in tokens: cost factor of the layers with that window}."""
    pin_memory: bool = False
    share: tuple[int, int] = (0, 1)
    """(index, number of shares). The ranks that form a data rank each hold one share of the tokens
    of its micro-batches.
    """

    def deal(self, lengths: np.ndarray) -> list[list[list[int]]]:
        """Divide the samples of one global batch into micro-batches within the limits, and balance
        them over data ranks by cost.

        `lengths` [samples] are token counts. Returns an equal number of micro-batches for each data
        rank. A micro-batch is a list of indices into `lengths`, possibly empty. A sample of n
        tokens costs `n + quadratic_cost * n**2`, and for each window w in `window_costs` its cost
        factor times `squared_length(n, w)`. Raises `ConfigError` for a sample beyond the limits.
        """
        max_tokens = self.limits.max_tokens or math.inf
        max_samples = self.limits.max_samples or math.inf
        if lengths.size and lengths.max() > max_tokens:
            raise ConfigError(
                f"data.max_token_len_per_gpu={max_tokens} is less than the {int(lengths.max())} "
                f"tokens of a sample.\nFix: raise it, or lower data.max_length"
            )
        costs = lengths + self.quadratic_cost * lengths.astype(np.float64) ** 2
        for window, cost in self.window_costs.items():
            costs += cost * squared_length(lengths, window)
        # Begin with the fewest micro-batches that the limits allow, in a multiple of the ranks.
        # Use more while the packing by `_fill` fails.
        least = max(lengths.sum() / max_tokens, len(lengths) / max_samples, 1)
        num_bins = math.ceil(math.ceil(least) / self.num_data_ranks) * self.num_data_ranks
        while (filled := _fill(lengths, costs, num_bins, max_tokens, max_samples)) is None:
            num_bins += self.num_data_ranks
        bins = [sorted(members) for members in filled]
        load = np.array([costs[members].sum() for members in bins])
        num_each = len(bins) // self.num_data_ranks
        dealt = _fill(load, load, self.num_data_ranks, math.inf, num_each)
        assert dealt is not None, "every rank gets equally many"
        return [[bins[index] for index in members] for members in dealt]


def squared_length(lengths: np.ndarray, window: int) -> np.ndarray:
    """Return about twice the number of token pairs in causal attention with a sliding window of
    `window` tokens: n**2 for n tokens up to the window, and about 2 * n * window far above it.
    """
    beyond: np.ndarray = np.maximum(lengths - window, 0.0)
    squares: np.ndarray = lengths.astype(np.float64) ** 2 - beyond**2
    return squares


def _fill(
    sizes: np.ndarray,
    costs: np.ndarray,
    num_bins: int,
    max_size: float,
    max_count: float,
) -> list[list[int]] | None:
    """Put each item, largest first, into the cheapest bin with room for it. Return the indices in
    each bin; None if an item fits into no bin.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled, counts, load = np.zeros((3, num_bins))
    for index in np.argsort(-sizes, kind="stable"):
        fits = (filled + sizes[index] <= max_size) & (counts < max_count)
        if not fits.any():
            return None
        target = int(np.argmin(np.where(fits, load, np.inf)))
        bins[target].append(int(index))
        filled[target] += sizes[index]
        counts[target] += 1
        load[target] += costs[index]
    return bins


def length_facts(lengths: np.ndarray, num_loss_tokens: np.ndarray) -> dict[str, float]:
    """Return mean, minimum, maximum and 95th percentile of prompt, completion and total tokens.

    The arguments are integer arrays [samples]. The completion consists of the supervised tokens,
    the prompt of all others.
    """
    kinds = {"prompt": lengths - num_loss_tokens, "completion": num_loss_tokens, "total": lengths}
    facts: dict[str, float] = {}
    for kind, tokens in kinds.items():
        rank_95 = min(len(tokens) - 1, int(0.95 * len(tokens)))
        facts[f"seq_{kind}_len_mean"] = float(tokens.mean())
        facts[f"seq_{kind}_len_min"] = int(tokens.min())
        facts[f"seq_{kind}_len_max"] = int(tokens.max())
        facts[f"seq_{kind}_len_p95"] = int(np.partition(tokens, rank_95)[rank_95])
    return facts


def deal_facts(
    lengths: np.ndarray,
    num_loss_tokens: np.ndarray,
    dealt: list[list[list[int]]],
    limits: Limits,
) -> dict[str, float]:
    """Return metrics on how a global batch was packed and distributed to the ranks. `dealt` is the result of
    `RankPlan.deal`.
    """
    num_tokens = int(lengths.sum())
    tokens_by_rank = [sum(int(lengths[part].sum()) for part in rank) for rank in dealt]
    num_full = sum(bool(part) for rank in dealt for part in rank)
    num_empty = sum(map(len, dealt)) - num_full
    facts = {
        "data/valid_token_frac": int(num_loss_tokens.sum()) / num_tokens,
        "data/pad_frac": num_empty / (num_tokens + num_empty),
        "data/token_imbalance": max(tokens_by_rank) * len(dealt) / num_tokens,
        "data/empty_label": int((num_loss_tokens == 0).sum()),
    }
    if limits.max_tokens is not None:
        facts["data/packing_efficiency"] = num_tokens / (num_full * limits.max_tokens)
    return facts
