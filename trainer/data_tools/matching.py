"""Which row here is which row there: by equal ids, else by stretches of tokens that no other row has.

A shuffled dump, rows that one side lacks and rows that differ in all turns are matched alike.
"""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import numpy as np

Pairs = list[tuple[int, int]]
STRETCH = 5
"""Tokens that are looked at together."""
FACTOR = np.uint64(6364136223846793005)
MIN_COMMON = 0.5
"""Share of the shorter row's tokens that rows without a stretch of their own must have in common."""


def match(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    """Pairs of row numbers, in the order of `here`; each row at most once."""
    pairs = _equal(here, there)
    for find in (_by_stretches, _in_order):
        taken_here, taken_there = {a for a, _ in pairs}, {b for _, b in pairs}
        rest_here = [number for number in range(len(here)) if number not in taken_here]
        rest_there = [number for number in range(len(there)) if number not in taken_there]
        if rest_here and rest_there:
            found = find([here[number] for number in rest_here], [there[number] for number in rest_there])
            pairs += [(rest_here[a], rest_there[b]) for a, b in found]
    return sorted(pairs)


def moved(pairs: Pairs) -> Pairs:
    """The fewest pairs without which the order is the same on both sides."""
    ends: list[int] = []
    ranks = []
    for _, there in pairs:
        rank = bisect.bisect_left(ends, there)
        ends[rank : rank + 1] = [there]
        ranks.append(rank)
    out, expected = [], len(ends) - 1
    for pair, rank in zip(reversed(pairs), reversed(ranks), strict=True):
        if rank == expected:
            expected -= 1
        else:
            out.append(pair)
    return out[::-1]


def _equal(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    waiting: dict[bytes, deque[int]] = defaultdict(deque)
    for number, ids in enumerate(there):
        waiting[ids.tobytes()].append(number)
    return [(number, waiting[key].popleft()) for number, ids in enumerate(here) if waiting.get(key := ids.tobytes())]


def _by_stretches(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    keys_here, rows_here = _stretches(here)
    keys_there, rows_there = _stretches(there)
    keys, first, counts = np.unique(keys_here, return_index=True, return_counts=True)
    keys, owners = keys[counts == 1], rows_here[first[counts == 1]]
    if not len(keys):
        return []
    found = np.searchsorted(keys, keys_there).clip(max=len(keys) - 1)
    is_known = keys[found] == keys_there
    codes, votes = np.unique(owners[found[is_known]] * len(there) + rows_there[is_known], return_counts=True)
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for code in codes[np.argsort(-votes, kind="stable")].tolist():
        a, b = divmod(code, len(there))
        if a not in pairs and b not in taken:
            pairs[a] = b
            taken.add(b)
    return list(pairs.items())


def _stretches(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the different stretches of each row, uint64, and their row numbers, int64."""
    keys = [_hashes(ids) for ids in rows]
    return np.concatenate(keys), np.repeat(np.arange(len(rows)), [len(found) for found in keys])


def _hashes(ids: np.ndarray) -> np.ndarray:
    num = max(0, len(ids) - STRETCH + 1)
    key = np.zeros(num, dtype=np.uint64)
    for offset in range(STRETCH):
        key = key * FACTOR + ids[offset : offset + num].astype(np.uint64) + np.uint64(1)
    return np.unique(key)


def _in_order(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    pairs = zip(range(len(here)), range(len(there)), strict=False)
    return [(a, b) for a, b in pairs if _common(here[a], there[b]) >= MIN_COMMON]


def _common(here: np.ndarray, there: np.ndarray) -> float:
    return (Counter(here.tolist()) & Counter(there.tolist())).total() / min(len(here), len(there))
