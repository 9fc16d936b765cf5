"""Shared by the scripts of all peers: arguments, the samples of the case, and the rows that they
report.

Imports none of our code.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument(
        "--random-weights", action="store_true", help="only the architecture is read"
    )
    parser.add_argument("--option", action="append", default=[])
    return parser.parse_args()


def read_samples(case: Path, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the first `count` samples in training order: (token ids, mask of the supervised ones)."""
    data = np.load(case / "samples.npz")
    bounds = data["offsets"][: count + 1]
    ids = data["input_ids"]
    mask = data["loss_mask"]
    return [(ids[a:b], mask[a:b]) for a, b in itertools.pairwise(bounds)]


class Report:
    """Print one JSON line per optimizer step with the time at which it ended (Unix seconds)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def add(self, **row: Any) -> None:
        self._file.write(json.dumps({**row, "ts": time.time()}) + "\n")
        self._file.flush()
