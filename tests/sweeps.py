"""How much of a long sweep runs: a sample that is always the same, or all of it with `pytest
--full`.
"""

import os
import random
from collections.abc import Iterable
from typing import TypeVar

SEED = 1
FULL = "SFT_FULL_SWEEPS"
"""Set by conftest.py where the command line says `--full`: in the environment, so that ranks
know it too.
"""
Value = TypeVar("Value")


def is_full() -> bool:
    return FULL in os.environ


def some(points: Iterable[Value], number: int) -> list[Value]:
    """`number` of the points in their order, drawn by `SEED`; all of them with `--full`."""
    points = list(points)
    if is_full() or number >= len(points):
        return points
    return [
        points[index] for index in sorted(random.Random(SEED).sample(range(len(points)), number))
    ]


def short_or_full(short: Value, full: Value) -> Value:
    return full if is_full() else short
