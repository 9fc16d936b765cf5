"""The entry of a metric, how ranks combine values, and the parts of a key that vary."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

COMBINED: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": fmean,
    "max": max,
    "min": min,
    "slowest": lambda values: values.index(max(values)),
    "skew": lambda values: max(values) / max(median(values), 1e-9),
}
"""Reductions of the values that ranks measure; such values travel in the step's packet.

The other two are "global" (of the whole batch or model, equal on every rank) and "main" (as rank 0
has it).
"""
REDUCERS = ("sum", "mean", "max", "min", "last", "norm", "std", "p50", "p95", "p99")
"""Suffixes as in `loss@mean`, with which other trainers name the reduction over ranks."""
PLACEHOLDERS = {"<infix>": "[^/]+/[^/]+", "<device>": r"\d+"}
"""Part of a key that differs from run to run -> the text it matches; any text, if not listed."""
_PARTS = re.compile("(<.*?>)")


@dataclass(frozen=True)
class Metric:
    key: str
    """As it is logged; may hold placeholders."""
    unit: str
    """"1" is a pure number, "share" 0 to 1."""
    better: str
    """up, down, middle (a middle range is best) or none."""
    meaning: str
    over_ranks: str = "global"
    """A key of `COMBINED`, "global" or "main"."""
    group: str = "other"
    every: str = "step"
    """step, eval, checkpoint, rare (every 50 steps), timer (measured every 10 s) or event."""
    of: str = ""
    """The metric whose values of all ranks it combines in another way; empty: its own."""
    console: str = ""
    """Format of its part of a console line, of `{}` or `{duration}`."""
    csv: str = ""
    """Column in the histories, and how an epoch's steps become one value: `seconds sum`."""

    @property
    def factor(self) -> float:
        """From its unit to the value that people are shown."""
        return 1e-3 if self.unit == "1e-3" else 1

    @property
    def source(self) -> str:
        return self.of or self.key


def split_reducer(key: str) -> tuple[str, str | None]:
    """Split `tokens@sum` into (`tokens`, `sum`); a key without such a suffix comes with None."""
    name, _, reducer = key.rpartition("@")
    return (name, reducer) if name and reducer in REDUCERS else (key, None)


@lru_cache
def pattern(key: str) -> re.Pattern[str]:
    """Compile a key with placeholders."""
    return re.compile(_PARTS.sub(lambda part: PLACEHOLDERS.get(part[0], ".+"), re.escape(key)))
