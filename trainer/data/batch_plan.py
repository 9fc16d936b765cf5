"""Decides which rows a step trains, and how ranks share their samples.

All functions here depend only on seed, epoch, lengths and counts, and use no torch.

A keyed permutation decides which row is trained at which place of an epoch. It is computed only for
the places that are asked for, so no process keeps a list of all rows. The validation rows are drawn
with the same permutation.

A global batch is a set of rows. A row is one sample, or several samples that stay together if a
conversation is divided by turns. Wherever samples of an epoch, a batch or a position are counted, a
row counts as one. Splitting a batch into micro-batches and ranks only decides who computes what.
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
    """The rows of a source, and how often an epoch trains them. With `repeat` 2.5, an epoch trains
    each row twice and half of the rows a third time.
    """

    num_rows: int
    repeat: float = 1.0

    @property
    def num_samples(self) -> int:
        """Number of samples in each epoch; half a sample is rounded up."""
        return math.floor(self.num_rows * self.repeat + 0.5)


def permuted(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map `places` through the permutation of 0 .. size - 1 that `key` selects; int64.

    The permutation is a Feistel network on pairs of remainders (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). There are `size` pairs and at most 2 sqrt(size) more. A place
    that lands outside 0 .. size - 1 is enciphered again.
    """
    width = math.isqrt(max(size, 1) - 1) + 1
    sizes = (np.uint64(-(-size // width)), np.uint64(width))
    generator = np.random.Generator(np.random.Philox(key))
    keys = generator.integers(0, 2**64, size=NUM_ROUNDS, dtype=np.uint64)
    found = np.asarray(places, dtype=np.uint64)
    found, outside = found.copy(), np.arange(len(found))
    while len(outside):
        found[outside] = _enciphered(found[outside], sizes, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _enciphered(
    values: np.ndarray, sizes: tuple[np.uint64, np.uint64], keys: np.ndarray
) -> np.ndarray:
    halves = list(np.divmod(values, sizes[1]))
    for number, key in enumerate(keys):
        changed = number % 2
        halves[changed] = (halves[changed] + _scattered(halves[1 - changed] + key)) % sizes[changed]
    return np.asarray(halves[0] * sizes[1] + halves[1])


def _scattered(values: np.ndarray) -> np.ndarray:
    """Apply the last steps of SplitMix64 (Steele, Lea and Flood 2014), which make each of the 64
    bits depend on all bits of the value.
    """
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> _SHIFTS[2])


def rows_at(
    places: np.ndarray, shares: tuple[Share, ...], *, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of the source, row in the source) at `places` (int64) of an epoch; int64.

    If an epoch trains some rows of a source once more than the others, it takes these rows from a
    fixed order of that source. The next epoch continues in this order. So over all epochs the
    counts of two rows of a source differ by at most one.
    """
    bounds = np.cumsum([0, *(share.num_samples for share in shares)])
    slots = permuted(places, int(bounds[-1]), seeding.key("epoch", seed, epoch))
    sources = np.searchsorted(bounds, slots, side="right") - 1
    rows = slots - bounds[sources]
    for number, share in enumerate(shares):
        times, num_more = divmod(share.num_samples, share.num_rows)
        own = np.flatnonzero(sources == number)
        once_more = own[rows[own] >= times * share.num_rows]
        turns = (rows[once_more] - times * share.num_rows + epoch * num_more) % share.num_rows
        rows[own] %= share.num_rows
        rows[once_more] = permuted(turns, share.num_rows, seeding.key("source", seed, number))
    return sources, rows


def held_out_rows(num_rows: int, val_ratio: float, *, seed: int) -> np.ndarray:
    """Return the rows held out for validation, ascending, int64.

    If there are two rows or more, at least one is held out and at least one is kept for training.
    With a ratio of 0, no row is held out.
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
    """The order in which a run trains rows from `start` on. Each step trains the next B rows of its
    epoch.

    The last batch of an epoch holds the remaining rows; no row is dropped. A schedule that starts
    at one of its own positions with the same values continues in the same order, even with a
    different batch size.
    """

    shares: tuple[Share, ...]
    batch_size: int
    seed: int
    start: Position = START
    order: str = "shuffled"
    """A key of `ORDERS`."""
    lengths: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Number of tokens of each row, int64, for an order that needs them."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return sum(share.num_samples for share in self.shares)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def _steps_left_in_first_epoch(self) -> int:
        num_left = max(0, self.num_samples - self.start.samples_consumed)
        return math.ceil(num_left / self.batch_size)

    def position(self, step: int) -> Position:
        """Return the position after `step` finished steps. `step` must not be before `start`."""
        start = self.start
        assert step >= start.step
        num_steps = step - start.step
        if num_steps < self._steps_left_in_first_epoch:
            return Position(step, start.epoch, start.samples_consumed + num_steps * self.batch_size)
        num_epochs, num_steps = divmod(
            num_steps - self._steps_left_in_first_epoch, self.steps_per_epoch
        )
        return Position(step, start.epoch + 1 + num_epochs, num_steps * self.batch_size)

    def steps_until(self, total_epochs: int) -> int:
        """Return the number of finished steps of the whole run once `total_epochs` epochs are
        done.
        """
        num_epochs = total_epochs - self.start.epoch
        if num_epochs <= 0:
            return self.start.step
        return (
            self.start.step
            + self._steps_left_in_first_epoch
            + (num_epochs - 1) * self.steps_per_epoch
        )

    def rows(self, step: int) -> np.ndarray:
        """Return the row ids of the global batch of `step` (counted from 1), int64, in epoch
        order.
        """
        position = self.position(step - 1)
        first = position.samples_consumed
        places = np.arange(first, min(first + self.batch_size, self.num_samples))
        return ORDERS[self.order](self, places, position.epoch)

    @cached_property
    def shortest_first(self) -> np.ndarray:
        """Row ids of the first epoch from the shortest row to the longest, int64. Rows of equal
        length are shuffled.
        """
        assert self.lengths is not None, "this order needs the lengths of the rows"
        ids = shuffled(self, np.arange(self.num_samples), epoch=0)
        return ids[np.argsort(self.lengths[ids], kind="stable")]


def shuffled(schedule: Schedule, places: np.ndarray, epoch: int) -> np.ndarray:
    """Return the row ids at `places` of an epoch, int64. Each epoch has its own permutation."""
    sources, rows = rows_at(places, schedule.shares, seed=schedule.seed, epoch=epoch)
    first_ids = np.cumsum([0, *(share.num_rows for share in schedule.shares)])
    return first_ids[sources] + rows


def short_first_epoch(schedule: Schedule, places: np.ndarray, epoch: int) -> np.ndarray:
    """Return row ids like `shuffled`, except that the first epoch goes from short to long rows."""
    return schedule.shortest_first[places] if epoch == 0 else shuffled(schedule, places, epoch)


ORDERS: dict[str, Callable[[Schedule, np.ndarray, int], np.ndarray]] = {
    "shuffled": shuffled,
    "short_first_epoch": short_first_epoch,
}
"""{value of `data.order`: function that maps schedule, places and epoch (from 0) to row ids}. The
functions are pure, because a resumed run asks for the same places again.
"""


@dataclass(frozen=True)
class RankPlan:
    """This rank's part of every global batch."""

    data_rank: int
    num_data_ranks: int
    limits: Limits
    quadratic_cost: float
    window_costs: Mapping[int, float] = field(default_factory=dict)
    """{window in tokens: cost factor of the layers with this sliding window}."""
    pin_memory: bool = False
    share: tuple[int, int] = (0, 1)
    """(index, number of shares): the share of each micro-batch's tokens that this rank holds. The
    ranks of a data rank hold one share each.
    """

    def deal(self, lengths: np.ndarray) -> list[list[list[int]]]:
        """Deal the samples of one global batch to data ranks as micro-batches within the limits,
        balanced by cost.

        `lengths` [samples] are token counts. Returns the micro-batches of each data rank, equally
        many for all ranks. A micro-batch is a list of indices into `lengths`, possibly empty. A
        sample of n tokens costs `n + quadratic_cost * n**2`. Each window w in `window_costs` adds
        its cost factor times `squared_length(n, w)`.
        """
        max_tokens = self.limits.max_tokens or math.inf
        max_samples = self.limits.max_samples or math.inf
        if lengths.size and lengths.max() > max_tokens:
            raise ConfigError(
                f"a sample of {int(lengths.max())} tokens exceeds "
                f"data.max_token_len_per_gpu={max_tokens}; raise it, or lower data.max_length"
            )
        costs = lengths + self.quadratic_cost * lengths.astype(np.float64) ** 2
        for window, cost in self.window_costs.items():
            costs += cost * squared_length(lengths, window)
        least = max(lengths.sum() / max_tokens, len(lengths) / max_samples, 1)
        num_bins = math.ceil(math.ceil(least) / self.num_data_ranks) * self.num_data_ranks
        while (filled := _fill(lengths, costs, num_bins, max_tokens, max_samples)) is None:
            num_bins += self.num_data_ranks
        bins = [sorted(members) for members in filled]
        load = np.array([costs[members].sum() for members in bins])
        num_each = len(bins) // self.num_data_ranks
        dealt = _fill(load, load, self.num_data_ranks, math.inf, num_each)
        assert dealt is not None, "every rank gets the same number"
        return [[bins[index] for index in members] for members in dealt]


def squared_length(lengths: np.ndarray, window: int) -> np.ndarray:
    """Return about twice the number of token pairs in causal attention with a sliding window.

    Each token sees at most `window` tokens, itself included. The result leaves out the diagonal,
    which would add n or `window`, whichever is smaller. It is n**2 up to the window, and about 2 *
    n * window far above it.
    """
    beyond: np.ndarray = np.maximum(lengths - window, 0.0)
    squares: np.ndarray = lengths.astype(np.float64) ** 2 - beyond**2
    return squares


def _fill(
    sizes: np.ndarray, costs: np.ndarray, num_bins: int, max_size: float, max_count: float
) -> list[list[int]] | None:
    """Put items, largest first, each into the cheapest bin with room. Return None if an item fits
    into no bin.
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
    """Return mean, minimum, maximum and 95th percentile of the samples' prompt, completion and
    total tokens.

    The arguments are int arrays [N]. The completion consists of the supervised tokens, the prompt
    of all others.
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
    lengths: np.ndarray, num_loss_tokens: np.ndarray, dealt: list[list[list[int]]], limits: Limits
) -> dict[str, float]:
    """Return metrics of how a global batch was packed and dealt. `dealt` holds the micro-batches of
    each data rank, each a list of indices.
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
