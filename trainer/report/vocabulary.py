"""Meanings of metrics in any log, ours or another trainer's, and what their jumps testify to."""

import re
from dataclasses import replace
from functools import cache

from trainer import metrics
from trainer.metrics.foreign import FOREIGN
from trainer.metrics.words import Metric, pattern, split_reducer
from trainer.report.names import ROLES

FAMILIES = {
    "length": "completions/|tokens/|.*response_length",
    "reward": "(train/)?(reward|tag_count)|critic/(score|reward)|val/(score|reward)|(.*/)?accuracy",
    "timing": "time/|throughput/|val/.*(runtime|per_second)|system/tps",
    "optimisation": "val/|optim/|guard/|actor/|train/(lr|ppl|loss)|clip_ratio|.*(kl|entropy)",
    "memory": "memory|train_memory|system/",
    "data": "data/|train/(total|.*_count)",
    "state": "progress/|.*num_tokens|.*max_steps",
}
"""Group -> beginnings of names that are in no table."""
_REPORT_GROUPS = {"validation": "optimisation", "guard": "optimisation"}
"""Groups of the table of metrics that a report shows as another."""


def lookup(key: str) -> Metric | None:
    """Return the entry of a key in any log, ours or another trainer's.

    `eval/` is another spelling of `val/`. Other trainers' names may have a prefix `train/`, `val/`
    or `eval/` that the table lacks. A suffix such as `@sum` is ignored.
    """
    name, _ = split_reducer(key)
    split, _, rest = name.partition("/")
    found = metrics.find(name) or _foreign(name)
    if found is None and split == "eval":
        found = metrics.find(f"val/{rest}") or _foreign(f"val/{rest}")
    if found is None and split in ("train", "val", "eval"):
        found = _foreign(rest)
    return found


def _foreign(name: str) -> Metric | None:
    patterns = (metric for key, metric in FOREIGN.items() if "<" in key)
    fitting = (metric for metric in patterns if pattern(metric.key).fullmatch(name))
    return FOREIGN.get(name) or next(fitting, None)


_ORDER = [key for keys in ROLES.values() for key in keys]


def role_order(key: str) -> tuple[int, str]:
    """Return a sort key: metrics that findings ask for come first, then by name."""
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


@cache
def meaning(key: str) -> Metric:
    """Describe a key of any log by the tables of metrics; of an unknown one, guess the group."""
    if (known := lookup(key) or lookup(f"train/{key}")) is not None:
        group = _REPORT_GROUPS.get(known.group, known.group)
        return replace(known, key=key, group=group, unit="" if known.unit == "1" else known.unit)
    groups = (group for group, beginning in FAMILIES.items() if re.match(beginning, key))
    return Metric(key, "", "none", "Unknown metric.", group=next(groups, "other"))


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
