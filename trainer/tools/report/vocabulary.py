"""The meanings of metrics in logs from this trainer and others."""

from functools import cache
from itertools import chain

from trainer.tools.report.names import ROLES
from trainer.tracking import metrics
from trainer.tracking.metrics.words import Metric, entry_of, split_reducer

UNKNOWN = "Unknown metric."
_ORDER = [key for keys in ROLES.values() for key in keys]


def role_order(key: str) -> tuple[int, str]:
    """Return a sort key that puts metrics that findings use first and sorts the rest by name."""
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


@cache
def meaning(key: str) -> Metric:
    """Return the entry for a key from any trainer's log, or an entry for an unknown metric.

    `eval/` is an alternative spelling of `val/`. Other trainers' names may have or lack a prefix
    `train/`, `val/` or `eval/`. A suffix such as `@sum` is ignored.
    """
    name, _ = split_reducer(key)
    split, _, rest = name.partition("/")
    ours = f"val/{rest}" if split == "eval" else name
    bare = rest if split in ("train", "val", "eval") else name
    spellings = (name, ours, f"train/{name}")
    own = map(metrics.find, spellings)
    foreign = (entry_of(spelling, metrics.FOREIGN) for spelling in (*spellings, bare))
    unknown = Metric(key, "1", "none", UNKNOWN)
    return next(filter(None, chain(own, foreign)), unknown)


def is_known(key: str) -> bool:
    """Return True if a table contains an entry for a key."""
    return meaning(key).meaning != UNKNOWN
