"""The one table of metrics: unit, meaning, reduction over ranks, console and CSV format.

To add a metric, write an entry in `table.py` and call `put` where its value is known. The entry's
`over_ranks` decides whether the value travels to the other ranks. Rows, the guard's rules, the
console, histories and docs/metrics.md follow the table.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import isnan, nan
from typing import SupportsFloat

from trainer.tracking.metrics import table
from trainer.tracking.metrics.words import COMBINED, Metric, entry_of

METRICS: dict[str, Metric] = {metric.key: metric for metric in table.TABLE}
"""Maps a key, which may hold placeholders, to its entry. Entries are added on every rank, before the
run is built.
"""
FOREIGN: dict[str, Metric] = {metric.key: metric for metric in table.FOREIGN}
"""Metrics of other trainers."""
NOT_COMBINED = ("global", "guard", "main")
ABSENT = float("-inf")
"""The packet's slot of a metric that a rank did not measure."""


class UnknownMetricWarning(UserWarning):
    """A value was put under a name that is not in the table; tests make it an error."""


_values: dict[str, SupportsFloat] = {}


def add(*keys: str) -> None:
    """Give keys that fit an entry with placeholders an entry, and so a slot in the packet, each.

    Call it with the same keys on every rank, before the run is built. Raises `KeyError` for a key
    that fits no entry.
    """
    for key in keys:
        metric = find(key)
        if metric is None:
            raise KeyError(f"no entry of the table of metrics fits '{key}'")
        METRICS[key] = replace(metric, key=key)


def put(key: str, value: SupportsFloat) -> None:
    """Give a metric this rank's value for the next row; a later one replaces it. Never waits for a
    device.

    A value that ranks combine may be a tensor of a device; it travels with the next step's packet.
    Any other is a number of the host. A name that is not in the table is logged as rank 0 has it,
    with a warning. Raises `ValueError` for a key that ranks combine and that only an entry with
    placeholders fits: without `add` it has no slot in the packet.
    """
    metric = find(key)
    if metric is None:
        cause = (
            f"metric '{key}' is not in the table: add its entry "
            f"(trainer/tracking/metrics/table.py) on every rank"
        )
        warnings.warn(cause, UnknownMetricWarning, stacklevel=2)
    elif metric.over_ranks in COMBINED and key not in METRICS:
        raise ValueError(
            f"metric '{key}' cannot be combined over ranks ({metric.over_ranks}): only the entry "
            f"'{metric.key}' fits it, so the other ranks may not know the key.\n"
            f"Fix: call trainer.tracking.metrics.add('{key}') on every rank before the run is built"
        )
    _values[key] = value


def take(over_ranks: Collection[str] = (*COMBINED, *NOT_COMBINED)) -> dict[str, SupportsFloat]:
    """Remove and return the values of metrics that are combined in one of these ways."""
    ways = {key: metric.over_ranks if (metric := find(key)) else "main" for key in _values}
    return {key: _values.pop(key) for key, way in ways.items() if way in over_ranks}


def take_numbers(over_ranks: Collection[str] = NOT_COMBINED) -> dict[str, float]:
    """Remove and return values that do not travel, as numbers for a row."""
    return {
        key: value if isinstance(value, int) else float(value)
        for key, value in take(over_ranks).items()
    }


def find(key: str) -> Metric | None:
    """Return the entry of a key, else the one whose placeholders fit, else None."""
    return entry_of(key, METRICS)


def is_signal(key: str) -> bool:
    """Return whether the guard may act on a metric: logged every step, bit-equal on all ranks, and
    not computed by the guard.
    """
    metric = find(key)
    if metric is None or metric.every != "step":
        return False
    return metric.over_ranks not in ("main", "guard")


def travelling() -> tuple[str, ...]:
    """Return the slots of each rank in a step's packet, in the same order on every rank."""
    return tuple(sorted({metric.source for metric in combined_metrics() if "<" not in metric.key}))


def combined_metrics() -> list[Metric]:
    """Return the entries whose values ranks combine."""
    return [metric for metric in METRICS.values() if metric.over_ranks in COMBINED]


def combined(
    by_rank: Mapping[str, tuple[float, ...]],
    *,
    is_rare: bool = True,
    among: Iterable[Metric] | None = None,
) -> dict[str, float]:
    """Combine all ranks' values of the slots that any rank measured; NaN of any rank gives NaN.

    Without `is_rare`, leave out metrics that are not logged every step. `among` is what
    `combined_metrics` returned, for callers that ask in every step.
    """
    found = {}
    for metric in combined_metrics() if among is None else among:
        if is_rare or metric.every not in ("rare", "timer"):
            values = by_rank.get(metric.source, ())
            measured = [value for value in values if value != ABSENT]
            if any(map(isnan, measured)):
                found[metric.key] = nan
            elif measured:
                # its position among all ranks names the slowest
                is_slowest = metric.over_ranks == "slowest"
                found[metric.key] = COMBINED[metric.over_ranks](
                    list(values) if is_slowest else measured
                )
    return found
