"""The order of an epoch: pure functions of seed, epoch and counts.

A keyed permutation decides which row is trained at which place of an epoch. It is computed for the
places that are asked for, so no process keeps a list of all rows. The validation rows are drawn
with the same permutation.
"""

import math
from dataclasses import dataclass

import numpy as np

from trainer.runtime import seeding

NUM_ROUNDS = 16
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class Share:
    """How often the rows of a source come in an epoch: with `repeat` 2.5 each twice, and half
    of them once more.
    """

    num_rows: int
    repeat: float = 1.0

    @property
    def num_samples(self) -> int:
        """The same in every epoch; half a sample counts whole."""
        return math.floor(self.num_rows * self.repeat + 0.5)


def permuted(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where the permutation of 0 .. size - 1 that `key` selects takes `places`; int64.

    A Feistel network on pairs of remainders (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). The pairs number `size` and at most 2 sqrt(size) more; a place that lands
    beyond `size` is enciphered again.
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
    """The end of SplitMix64 (Steele, Lea and Flood 2014): 64 bits that all depend on all bits
    of `values`.
    """
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> _SHIFTS[2])


def rows_at(
    places: np.ndarray, shares: tuple[Share, ...], *, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """(Number of the source, row in it) at `places` (int64) of an epoch; int64.

    Each source walks through a fixed order of its own for the rows that come once more, and
    continues there in the next
    epoch: over epochs no row comes twice as often as another.
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
    """Rows held out for validation, ascending, int64: of two rows or more at least one on each
    side.

    None with a ratio of 0.
    """
    if val_ratio <= 0 or num_rows < 2:
        return np.zeros(0, dtype=np.int64)
    count = min(max(1, round(num_rows * val_ratio)), num_rows - 1)
    return np.sort(permuted(np.arange(count), num_rows, seeding.key("split", seed, 0)))
