"""What an entry of the table of metrics says, and the words it may say it with."""

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

GROUPS = {
    "optimisation": "loss, gradient, learning rate",
    "validation": "loss on held-out data",
    "length": "lengths of samples",
    "data": "what the batches are made of",
    "timing": "where the time goes, throughput",
    "memory": "of devices and hosts",
    "state": "progress, restarts, checkpoints",
    "guard": "online detection of anomalies",
    "other": "hardware, and what watching costs",
}
COMBINED = {
    "sum": "sum over ranks",
    "mean": "mean over ranks",
    "max": "largest of all ranks",
    "min": "smallest of all ranks",
    "slowest": "the rank where it is largest",
    "skew": "largest / median over ranks",
}
"""How values that ranks measure become one; they travel in the step's packet."""
OVER_RANKS = COMBINED | {
    "global": "of the whole batch or model, the same on every rank",
    "main": "as rank 0 has it",
}
REDUCERS = {
    "sum": "sum over ranks",
    "mean": "mean over all ranks, each counting with its tokens or samples",
    "max": "largest of all ranks",
    "min": "smallest of all ranks",
    "last": "as rank 0 has it",
    "norm": "root of the sum of squares over all ranks",
    "std": "standard deviation over all ranks",
    "p50": "median over all ranks",
    "p95": "95th percentile over all ranks",
    "p99": "99th percentile over all ranks",
}
"""Suffixes as in `loss@mean`, with which other trainers say how ranks are reduced: no part of
the name.
"""
BETTER = {
    "down": "lower is better",
    "up": "higher is better",
    "middle": "a middle range is best",
    "none": "neither end is better",
}
EVERY = {
    "step": "every step",
    "eval": "every validation, configured by `trainer.test_freq`",
    "checkpoint": "every checkpoint, configured by `trainer.save_freq`",
    "rare": "every 50 steps",
    "timer": "measured every 10 s, logged every 50 steps",
    "event": "when it happens",
}
PLACEHOLDERS = {
    "<source>": (".+", "name of a data source"),
    "<group>": (".+", "name of a parameter group"),
    "<block>": (".+", "name of a layer block"),
    "<name>": (".+", "name of a reward function"),
    "<infix>": (
        r"[^/]+/[^/]+",
        "cluster and operation in ROLL's names: actor_train/compute_log_probs",
    ),
    "<device>": (r"\d+", "number of the device"),
}
"""Part of a key that differs from run to run -> what it matches, and what it means."""


def split_reducer(key: str) -> tuple[str, str | None]:
    """`tokens@sum` -> (`tokens`, `sum`); a key without such a suffix comes back as it is, with
    None.
    """
    name, _, reducer = key.rpartition("@")
    return (name, reducer) if name and reducer in REDUCERS else (key, None)


@lru_cache
def pattern(key: str) -> re.Pattern[str]:
    """What the placeholders of a key may stand for."""
    parts = re.split("(<.*?>)", key)
    return re.compile(
        "".join(f"(?:{PLACEHOLDERS[p][0]})" if p in PLACEHOLDERS else re.escape(p) for p in parts)
    )


Better = Literal["down", "up", "middle", "none"]
Every = Literal["step", "eval", "checkpoint", "rare", "timer", "event"]


def read_table(path: str) -> list[dict[str, Any]]:
    """The rows of a table of metrics beside the code, by the names of its columns."""
    text = files("trainer").joinpath(path).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


@dataclass(frozen=True)
class Metric:
    key: str
    """As it is logged; may hold placeholders."""
    unit: str
    """1 = pure number, share = 0 to 1."""
    over_ranks: Literal["sum", "mean", "max", "min", "slowest", "skew", "global", "main"]
    group: Literal[
        "optimisation",
        "validation",
        "length",
        "data",
        "timing",
        "memory",
        "state",
        "guard",
        "other",
    ]
    better: Better
    every: Every
    meaning: str
    of: str = ""
    """The metric whose values of all ranks it combines in another way; empty: its own."""
    config: tuple[str, ...] = ()
    """Configuration keys that shape it."""
    console: str = ""
    """How a line of the console shows it, in the order of the table: a format of `{}`, or of
    `{duration}`.
    """
    csv: str = ""
    """Its column in the histories and how an epoch's steps become one value: `seconds sum`."""

    @property
    def factor(self) -> float:
        """From its unit to what people are shown."""
        return 1e-3 if self.unit == "1e-3" else 1

    @property
    def source(self) -> str:
        return self.of or self.key
