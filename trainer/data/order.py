"""The order of an epoch: pure functions of seed, epoch and counts, for the places that are asked and no others.

A place p of an epoch trains the row that a keyed permutation puts there. `feistel` computes it, so that no process
keeps a list of all rows; `listed` draws that list: runs that began with it go on in it. Which rows are held out for
validation is drawn alike.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trainer.runtime import seeding

NUM_ROUNDS = 16
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class Share:
    """How often the rows of a source come in an epoch: with `repeat` 2.5 each twice, and half of them once more."""

    num_rows: int
    repeat: float = 1.0

    @property
    def num_samples(self) -> int:
        """The same in every epoch; half a sample counts whole."""
        return math.floor(self.num_rows * self.repeat + 0.5)


Permutation = Callable[[np.ndarray, int, int], np.ndarray]
"""From places, size and key: where a permutation of 0 .. size - 1 drawn by the key takes the places; int64."""


def feistel(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """A Feistel network on pairs of remainders: what it takes beyond `size` walks on until it is inside.

    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002). The pairs are `size` and at most 2 sqrt(size)
    more: hardly any place walks.
    """
    width = math.isqrt(max(size, 1) - 1) + 1
    sizes = (np.uint64(-(-size // width)), np.uint64(width))
    keys = _generator(key).integers(0, 2**64, size=NUM_ROUNDS, dtype=np.uint64)
    found = np.asarray(places, dtype=np.uint64)
    found, outside = found.copy(), np.arange(len(found))
    while len(outside):
        found[outside] = _enciphered(found[outside], sizes, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _enciphered(values: np.ndarray, sizes: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    halves = list(np.divmod(values, sizes[1]))
    for number, key in enumerate(keys):
        changed = number % 2
        halves[changed] = (halves[changed] + _scattered(halves[1 - changed] + key)) % sizes[changed]
    return np.asarray(halves[0] * sizes[1] + halves[1])


def _scattered(values: np.ndarray) -> np.ndarray:
    """The end of SplitMix64 (Steele, Lea and Flood 2014): 64 bits that all depend on all bits of `values`."""
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> _SHIFTS[2])


def listed(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Of a list of all, drawn by numpy."""
    return _list(size, key)[places]


@functools.lru_cache(maxsize=4)
def _list(size: int, key: int) -> np.ndarray:
    return _generator(key).permutation(size)


def _generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key))


FEISTEL, LISTED = "feistel", "listed"
ORDERS: dict[str, Permutation] = {FEISTEL: feistel, LISTED: listed}
"""By the name that a checkpoint has of it; what has none is `listed`."""


def rows_at(
    places: np.ndarray, shares: tuple[Share, ...], *, seed: int, epoch: int, order: str = FEISTEL
) -> tuple[np.ndarray, np.ndarray]:
    """(Number of the source, row in it) at `places` (int64) of an epoch; int64.

    Rows that come once more are the next so many of an order of their own, walked round and round over the epochs:
    none comes twice as often as another.
    """
    permuted = ORDERS[order]
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


SPLIT_STREAM = 1  # keeps the draw of the validation rows apart from other uses of the seed


@dataclass(frozen=True)
class Draw:
    """Rows drawn by their number, ratio and seed alone; of later ones anew, so that no old one changes sides.

    `sizes` are the rows there were each time some were drawn, rising.
    """

    val_ratio: float
    seed: int
    sizes: tuple[int, ...]
    order: str = FEISTEL

    def rows(self) -> np.ndarray:
        """Held out, rising, int64. Of two first rows or more at least one on each side, unless the ratio is 0."""
        parts = [self._drawn(first, end) for first, end in itertools.pairwise((0, *self.sizes))]
        return np.sort(np.concatenate(parts))

    def _drawn(self, first: int, end: int) -> np.ndarray:
        size = end - first
        count = round(size * self.val_ratio)
        if first == 0:
            count = min(max(1, count), size - 1) if self.val_ratio > 0 and size >= 2 else 0
        if self.order == LISTED:
            key: Any = [self.seed % 2**64, SPLIT_STREAM]
            return first + np.random.Generator(np.random.Philox(key=key)).permutation(size)[:count]
        return first + ORDERS[self.order](np.arange(count), size, seeding.key("split", self.seed, first))


@dataclass(frozen=True, eq=False)
class AllBut:
    """The numbers 0 to `count` - 1 without those `left_out` (rising, int64), in order; a list of them costs memory."""

    count: int
    left_out: np.ndarray

    def __len__(self) -> int:
        return self.count - len(self.left_out)

    @cached_property
    def _places_before(self) -> np.ndarray:
        """How many numbers that are not left out come before each that is."""
        return self.left_out - np.arange(len(self.left_out))

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return np.asarray(places + np.searchsorted(self._places_before, places, side="right"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[np.arange(len(self))]


Rows = np.ndarray | AllBut
