"""Meanings of metrics in any log, ours or another trainer's."""

from functools import cache

from trainer.tools.report.names import ROLES
from trainer.tracking import metrics
from trainer.tracking.metrics.words import Metric, entry_of, split_reducer

_ORDER = [key for keys in ROLES.values() for key in keys]


def lookup(key: str) -> Metric | None:
    """Return the entry of a key in any log, ours or another trainer's.

    `eval/` is another spelling of `val/`. Other trainers' names may have a prefix `train/`, `val/`
    or `eval/` that the table lacks. A suffix such as `@sum` is ignored.
    """
    name, _ = split_reducer(key)
    split, _, rest = name.partition("/")
    ours = f"val/{rest}" if split == "eval" else name
    bare = rest if split in ("train", "val", "eval") else name
    own = metrics.find(name) or metrics.find(ours)
    foreign = (entry_of(spelling, metrics.FOREIGN) for spelling in (name, ours, bare))
    return own or next(filter(None, foreign), None)


def role_order(key: str) -> tuple[int, str]:
    """Return a sort key: metrics that findings ask for come first, then by name."""
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


@cache
def meaning(key: str) -> Metric:
    """Return the entry for a key of any trainer's log, or an entry that says the key is unknown."""
    return lookup(key) or lookup(f"train/{key}") or Metric(key, "1", "none", "Unknown metric.")
