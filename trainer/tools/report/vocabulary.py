"""Meanings of metrics in any log, ours or another trainer's, and what their jumps testify to."""

import re
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
    """Return the entry that describes a key of any log; a key without one has no meaning."""
    return lookup(key) or lookup(f"train/{key}") or Metric(key, "1", "none", "Unknown metric.")


_WITNESSES = {
    "rate": ROLES["lr"],
    "loss": ROLES["loss"],
    "gradient": ROLES["grad"],
    "kl": (*ROLES["kl"], *ROLES["update_kl"]),
    "policy": (*ROLES["clip_ratio"], *ROLES["entropy"]),
}
_OF_GENERATION = re.compile(
    r"(?P<length>completions/.*|tokens/.*|train/seq_(?!prompt|total).*|.*response_length.*)|"
    r"(?P<reward>(?!.*([_/]std|_min|_max)$)((train/)?(reward|tag_count).*|critic/(score|rewards?)[_/].*"
    r"|(.*/)?(accuracy(_mean)?|budget_violation_rate|latency_mean)))"
)
"""Lengths and rewards depend on the model only where it generates; otherwise on the batch."""


def witness_group(key: str, *, is_generating: bool) -> str | None:
    """Return what a jump of a metric testifies to: rate, loss, gradient, kl, length, reward or
    policy; None for bookkeeping.
    """
    group = next((group for group, keys in _WITNESSES.items() if key in keys), None)
    if group is None and not key.startswith(("val/", "eval/")):
        match = _OF_GENERATION.fullmatch(key)
        group = match.lastgroup if match else None
    return group if is_generating or group in ("rate", "loss", "gradient", "kl") else None


CHAIN_GROUPS = ("rate", "kl", "policy", "length", "reward", "gradient", "loss")
"""In the order in which one is known to cause the next, for those that set in at the same point."""
