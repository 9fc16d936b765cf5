"""How much of a long sweep runs: a constant sample, or everything with `pytest --full`."""

import os
import random
from typing import TypeVar

SEED = 1
FULL = "SFT_FULL_SWEEPS"
"""conftest.py sets this for `--full`, in the environment so that ranks see it too."""
Value = TypeVar("Value")


def is_full():
    return FULL in os.environ


def some(points, number):
    """Return `number` of the points in their order, drawn by `SEED`, or all of them with `--full`."""
    points = list(points)
    if is_full() or number >= len(points):
        return points
    return [
        points[index] for index in sorted(random.Random(SEED).sample(range(len(points)), number))
    ]


def short_or_full(short, full):
    return full if is_full() else short
