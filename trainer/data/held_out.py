"""Which rows of a source are held out for validation, and the others without a list of them."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trainer.data.order import FEISTEL, LISTED, ORDERS
from trainer.runtime import seeding

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
