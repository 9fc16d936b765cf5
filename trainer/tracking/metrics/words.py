"""Defines the table entry of a metric, the reductions over ranks, and the placeholders in keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

COMBINED: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": fmean,
    "max": max,
    "min": min,
    "slowest": lambda values: values.index(max(values)),
}
"""The reductions of values that each rank measures. Such values are sent to the other ranks in the
step's packet.

The other kinds of metrics are "global" (a value of the whole batch or model, equal on every rank),
"guard" (computed by the guard, equal on every rank) and "main" (rank 0's value).
"""
_REDUCER = re.compile("(.+)@(sum|mean|max|min|last|norm|std|p50|p95|p99)")
"""Matches a key with a suffix that names its reduction, as in other trainers: `loss@mean`."""
PLACEHOLDERS = {
    "<infix>": "[^/]+/[^/]+",
    "<device>": r"\d+",
    "<split>": "(train|val)",
    "<statistic>": "(mean|min|max)",
}
"""Maps a placeholder in a key to the pattern that it matches. Other placeholders match any text."""
_PARTS = re.compile("(<.*?>)")
GROUPS = {
    "length": "completions/|tokens/|(train|val)/seq_|.*response_length",
    "reward": "(train/|val/)?(reward|tag_count)|critic/(score|reward|returns|values)|val/score|"
    "(.*/)?(accuracy|latency|budget)|frac_reward",
    "timing": "time/|throughput/|val/.*(runtime|per_second)|system/tps|train/time|weights/sync",
    "state": "progress/|ckpt/|checkpoint/|weights/|.*num_tokens|.*max_steps",
    "data": "data/|train/(total_|.*_count)|actor/(valid|total)_sample",
    "optimisation": "train/|val/|optim/|guard/|actor/|critic/|moe/|clip_ratio|.*(kl|entropy)",
    "memory": "memory|train_memory",
}
"""Maps a group of metrics to a pattern for the beginning of their keys. The first matching group is
used.
"""


@dataclass(frozen=True)
class Metric:
    """An entry of the table of metrics: what a key means, and how it is reduced and shown."""

    key: str
    """The key in the log, which may contain placeholders."""
    unit: str
    """The unit of the values. "1" means a pure number, "share" a number from 0 to 1."""
    better: str
    """The better direction: up, down, middle (a middle range is best) or none."""
    meaning: str
    over_ranks: str = "global"
    """The reduction over ranks: a key of `COMBINED`, "global", "guard" or "main"."""
    every: str = "step"
    """The rows that hold the metric: step, eval, checkpoint, rare (every 50 steps), timer (measured
    every 10 s) or event.
    """
    of: str = ""
    """The key of the metric whose values are reduced; empty for the metric itself."""
    console: str = ""
    """The format of the metric in a console line, with `{}` or `{duration}`."""
    csv: str = ""
    """The column in the histories and the reduction over an epoch's steps, as in `seconds sum`."""

    @property
    def factor(self) -> float:
        """The factor that converts a logged value to the value that users see."""
        return 1e-3 if self.unit == "1e-3" else 1

    @property
    def source(self) -> str:
        return self.of or self.key

    @property
    def group(self) -> str:
        """The first key of `GROUPS` whose pattern matches, else "other"."""
        found = (group for group, names in GROUPS.items() if re.match(names, self.key))
        return next(found, "other")


def split_reducer(key: str) -> tuple[str, str | None]:
    """Split `tokens@sum` into (`tokens`, `sum`). Without such a suffix, the second item is None."""
    match = _REDUCER.fullmatch(key)
    return (match[1], match[2]) if match else (key, None)


@lru_cache
def pattern(key: str) -> re.Pattern[str]:
    """Compile a key with placeholders to a pattern."""
    return re.compile(_PARTS.sub(lambda part: PLACEHOLDERS.get(part[0], ".+"), re.escape(key)))


def entry_of(key: str, table: Mapping[str, Metric]) -> Metric | None:
    """Return the entry of a key, else the first entry whose placeholders match it, else None."""
    if key in table:
        return table[key]
    patterns = (metric for name, metric in table.items() if "<" in name)
    return next((metric for metric in patterns if pattern(metric.key).fullmatch(key)), None)
