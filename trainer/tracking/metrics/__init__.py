"""The central table of metrics: unit, meaning, reduction over ranks, console and CSV format.

To add a metric, write an entry in `table.py`, and call `put` where its value is known. The entry's
`over_ranks` decides whether the value is sent to the other ranks. The rows, the guard's rules, the
console, the histories and docs/metrics.md all follow the table.
"""

import warnings
from collections.abc import Iterable, Mapping
from math import isnan, nan
from typing import SupportsFloat

from trainer.tracking.metrics import table
from trainer.tracking.metrics.words import COMBINED, Metric, entry_of

METRICS: dict[str, Metric] = {metric.key: metric for metric in table.TABLE}
"""Maps a key, which may contain placeholders, to its entry. Add your own entries on every rank,
before the run is built.
"""
FOREIGN: dict[str, Metric] = {metric.key: metric for metric in table.FOREIGN}
"""Maps the keys of other trainers' metrics to their entries."""
ABSENT = float("-inf")
"""The value in the packet for a metric that a rank did not measure."""


class UnknownMetricWarning(UserWarning):
    """The key of a metric is not in the table. Tests turn this warning into an error."""


_travelling: dict[str, SupportsFloat] = {}
_for_row: dict[str, float] = {}


def put(key: str, value: SupportsFloat) -> None:
    """Set this rank's value of a metric for the next row. A later value replaces it.

    The value of a metric that is reduced over ranks may be a scalar tensor on a device; the next
    packet carries it without waiting for the device. Any other value must be a Python number, and
    the row holds rank 0's value. A key that matches no entry causes a warning. Raises `ValueError`
    for a key that is reduced over ranks but matches only an entry with placeholders, because the
    packet has no slot for it.
    """
    metric = find(key)
    if metric and metric.over_ranks in COMBINED:
        if key not in METRICS:
            raise ValueError(
                f"metric '{key}' cannot be reduced over ranks: the table has only '{metric.key}', "
                f"so other ranks may lack this key.\n"
                f"Fix: add '{key}' to trainer.tracking.metrics.METRICS on every rank before you "
                f"create the run"
            )
        _travelling[key] = value
        return
    if metric is None:
        message = f"metric '{key}' is not in the table: add its entry to METRICS on every rank"
        warnings.warn(message, UnknownMetricWarning, stacklevel=2)
    _for_row[key] = value if isinstance(value, int) else float(value)


def take_travelling() -> dict[str, SupportsFloat]:
    """Remove and return this rank's values of metrics that are reduced over ranks."""
    found = dict(_travelling)
    _travelling.clear()
    return found


def take_for_row() -> dict[str, float]:
    """Remove and return the values that go into the next row unreduced."""
    found = dict(_for_row)
    _for_row.clear()
    return found


def find(key: str) -> Metric | None:
    """Return the entry of a key, else the first entry whose placeholders match it, else None."""
    return entry_of(key, METRICS)


def is_signal(key: str) -> bool:
    """Return True if the guard may act on a metric.

    Such a metric is logged every step, is bit-identical on all ranks, and is not computed by the
    guard itself.
    """
    metric = find(key)
    if not metric or metric.every != "step":
        return False
    return metric.over_ranks not in ("main", "guard")


def combined_metrics() -> list[Metric]:
    """Return the entries of metrics that are reduced over ranks."""
    return [metric for metric in METRICS.values() if metric.over_ranks in COMBINED]


def combine(
    entries: Iterable[Metric], by_rank: Mapping[str, tuple[float, ...]]
) -> dict[str, float]:
    """Reduce the values of all ranks to the metrics of `entries`.

    Metrics that no rank measured are left out. NaN on any rank gives NaN.
    """
    found = {}
    for metric in entries:
        values = by_rank.get(metric.source, ())
        measured = [value for value in values if value != ABSENT]
        if any(map(isnan, measured)):
            found[metric.key] = nan
        elif measured:
            # the slowest rank is identified by its position among all ranks
            counted = list(values) if metric.over_ranks == "slowest" else measured
            found[metric.key] = COMBINED[metric.over_ranks](counted)
    return found
