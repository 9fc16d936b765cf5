"""The one table of metrics (floor 0): what each is, how ranks combine it, how it is shown; `put`
gives one its value.

A new metric is an entry of `table.tsv` and a `put` where its value is known: what its `over_ranks`
says decides whether the value travels to the other ranks, and its row, the guard's rules, console,
histories and docs/metrics.md follow.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isnan, nan
from statistics import fmean, median
from typing import SupportsFloat

from trainer.metrics.table import TABLE
from trainer.metrics.words import COMBINED, GROUPS, OVER_RANKS, Metric, pattern

METRICS: dict[str, Metric] = {metric.key: metric for metric in TABLE}
"""By key, which may hold placeholders. Whoever adds one does so on every rank, before the run
is built.
"""
ABSENT = float("-inf")
"""Stands in the packet for what a rank did not measure."""


class UnknownMetricWarning(UserWarning):
    """A value was put under a name that is not in the table; tests make it an error."""


_values: dict[str, SupportsFloat] = {}


def put(key: str, value: SupportsFloat) -> None:
    """Give a metric this rank's value for the coming row; a later one replaces it. Never waits for
    a device.

    What is combined over ranks may be a tensor of a device and travels with the next step's packet;
    the rest is a number of the host and only needs a row. A name that is not in the table is logged
    as rank 0 has it, with a warning. Raises `ValueError` for a key that ranks combine and that only
    an entry with placeholders fits: ranks may not know each other's keys, so it has no slot in the
    packet.
    """
    metric = find(key)
    if metric is not None and metric.over_ranks in COMBINED and key not in METRICS:
        raise ValueError(
            f"metric '{key}' cannot be combined over ranks ({metric.over_ranks}): only the entry "
            f"'{metric.key}' fits it, and ranks would not know which names of it the others have.\n"
            f"Fix: before the run is built, add an entry for '{key}' itself to "
            f"trainer.metrics.METRICS on every rank"
        )
    if metric is None:
        cause = f"metric '{key}' is not in the table: add its entry (trainer/metrics/table.tsv) on every rank"
        warnings.warn(cause, UnknownMetricWarning, stacklevel=2)
    _values[key] = value


def take(over_ranks: Collection[str] = OVER_RANKS) -> dict[str, SupportsFloat]:
    """Remove and return what was put of the metrics that are combined in these ways."""
    return {key: _values.pop(key) for key in list(_values) if (_way(key) or "main") in over_ranks}


def take_numbers(over_ranks: Collection[str] = ("global", "main")) -> dict[str, float]:
    """The same of what does not travel, as numbers for a row."""
    return {
        key: value if isinstance(value, int) else float(value)
        for key, value in take(over_ranks).items()
    }


def _way(key: str) -> str | None:
    """How its values are combined; None for what has no entry."""
    metric = find(key)
    return None if metric is None else metric.over_ranks


def find(key: str) -> Metric | None:
    """The metric of that key, else the one whose placeholders fit, else None."""
    if (metric := METRICS.get(key)) is not None:
        return metric
    return next(
        (
            metric
            for name, metric in METRICS.items()
            if "<" in name and pattern(name).fullmatch(key)
        ),
        None,
    )


def by_group() -> list[Metric]:
    return sorted(METRICS.values(), key=lambda metric: list(GROUPS).index(metric.group))


def charts() -> dict[str, dict[str, list[str]]]:
    """For dashboards, by group and title: what is logged every step or validation, both of one
    name in one chart.
    """
    titled: dict[str, list[str]] = {}
    for key, metric in METRICS.items():
        if metric.every in ("step", "eval") and "<" not in key:
            titled.setdefault(key.removeprefix("train/").removeprefix("val/"), []).append(key)
    sections: dict[str, dict[str, list[str]]] = {}
    for title, keys in titled.items():
        sections.setdefault(METRICS[keys[0]].group, {})[title] = keys
    return sections


def is_signal(key: str) -> bool:
    """Whether the guard may act on it: of every step, equal on all ranks bit by bit, and not
    the guard's own word.
    """
    metric = find(key)
    return (
        metric is not None
        and metric.every == "step"
        and metric.over_ranks != "main"
        and metric.group != "guard"
    )


def travelling() -> tuple[str, ...]:
    """The slots of each rank in a step's packet, in the same order on every rank."""
    found = (
        metric.source
        for metric in METRICS.values()
        if metric.over_ranks in COMBINED and "<" not in metric.key
    )
    return tuple(sorted(set(found)))


def combined(by_rank: Mapping[str, tuple[float, ...]], *, is_rare: bool = True) -> dict[str, float]:
    """The metrics that all ranks' values of the slots give, for those that any rank measured;
    without `is_rare` none that are logged but now and then.
    """
    found = {}
    for metric in METRICS.values():
        if metric.over_ranks in COMBINED and (is_rare or metric.every not in ("rare", "timer")):
            values = by_rank.get(metric.source, ())
            if any(value != ABSENT for value in values):
                found[metric.key] = combine(metric.over_ranks, values)
    return found


def combine(over_ranks: str, by_rank: Sequence[float]) -> float:
    """One number of the values of all ranks, without those that are absent; NaN where any is
    one, whichever rank's.
    """
    if over_ranks == "slowest":
        return by_rank.index(max(by_rank))
    numbers = [number for number in by_rank if number != ABSENT]
    if any(map(isnan, numbers)):
        return nan
    if over_ranks == "skew":
        return max(numbers) / max(median(numbers), 1e-9)
    ways: dict[str, Callable[[list[float]], float]] = {
        "sum": sum,
        "mean": fmean,
        "max": max,
        "min": min,
    }
    return ways[over_ranks](numbers)
