"""Rows of values in which every pair of values of two features meets: a greedy covering array,
drawn by a seed.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]
NUM_CANDIDATES = 12
"""Rows drawn for each that is taken: the one that brings most new meetings."""


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def all_pairs(features: Mapping[str, Sequence[str]]) -> set[Pair]:
    names = itertools.combinations(features, 2)
    return {
        frozenset(((a, left), (b, right)))
        for a, b in names
        for left, right in itertools.product(features[a], features[b])
    }


def covering_rows(
    features: Mapping[str, Sequence[str]], *, excluded: set[Pair], seed: int
) -> list[Row]:
    """Every pair that is not `excluded`; where nothing new can meet, a feature has its first
    value.
    """
    generator, missing, rows = random.Random(seed), all_pairs(features) - excluded, list[Row]()
    while missing:
        candidates = [_row(features, missing, excluded, generator) for _ in range(NUM_CANDIDATES)]
        row = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing))
        missing -= pairs_of(row)
        rows.append({name: row[name] for name in features})
    return rows


def _row(
    features: Mapping[str, Sequence[str]],
    missing: set[Pair],
    excluded: set[Pair],
    generator: random.Random,
) -> Row:
    """One that begins with a missing pair; each further feature takes what brings most of the
    others.
    """
    row = dict(generator.choice(sorted(missing, key=sorted)))
    for name in generator.sample(sorted(features.keys() - row), len(features) - len(row)):
        gains = dict[str, int]()
        for value in features[name]:
            pairs = {frozenset(((name, value), other)) for other in row.items()}
            if not pairs & excluded:
                gains[value] = len(pairs & missing)
        row[name] = max(gains, key=lambda value: gains[value])
    return row
