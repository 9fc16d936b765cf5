"""What metrics are: the roles that rules ask for, and each key's group, unit, good direction and
meaning.

A role is named by the first of its keys that a log has; which one that is depends on the framework
that wrote it. This trainer computes none of the `FOREIGN` metrics: their names and meanings are for
reading logs, and for who logs them through `Tracking`; what it does stands in `trainer.metrics`.
"""

import re
from dataclasses import dataclass
from functools import cache

from trainer import metrics
from trainer.metrics.words import Better, Metric, pattern, read_table, split_reducer
from trainer.report.names import ROLES


@dataclass(frozen=True)
class Foreign:
    """What is known about a metric of any name."""

    key: str
    """May hold placeholders, as those of `trainer.metrics`."""
    unit: str
    group: str
    better: Better
    meaning: str


FOREIGN = tuple(Foreign(**row) for row in read_table("report/foreign_metrics.tsv"))
_EXACT = {metric.key: metric for metric in FOREIGN}
_PATTERNS = [metric for metric in FOREIGN if "<" in metric.key]


def lookup(key: str) -> Metric | Foreign | None:
    """What is known about a key in any log: of our own metrics, else of other trainers'.

    `eval/` is another spelling of `val/`; some trainers put either or `train/` before names that
    stand here without. A suffix such as `@sum` is taken off.
    """
    name, _ = split_reducer(key)
    place, _, rest = name.partition("/")
    found = _find(name) or (_find(f"val/{rest}") if place == "eval" else None)
    return found or (_foreign(rest) if place in ("train", "val", "eval") else None)


def _find(name: str) -> Metric | Foreign | None:
    return metrics.find(name) or _foreign(name)


def _foreign(name: str) -> Foreign | None:
    return _EXACT.get(name) or next(
        (metric for metric in _PATTERNS if pattern(metric.key).fullmatch(name)), None
    )


_ORDER = {key: place for place, key in enumerate(key for keys in ROLES.values() for key in keys)}


def role_order(key: str) -> tuple[int, str]:
    """To sort metrics by: those that rules look at come first, then by name."""
    return _ORDER.get(key, len(_ORDER)), key


_FAMILIES = tuple(Foreign(**row) for row in read_table("report/metric_families.tsv"))
"""Of names that stand in no table what they look like: their keys are regular expressions."""
_GROUPS = {"validation": "optimisation", "guard": "optimisation"}
"""Groups of the table of metrics that a report shows as another."""


@cache
def meaning(key: str) -> Foreign:
    """Of a key: what a table of metrics says of it, ours or that of other trainers, else what its
    family is.

    Group `other` stands for one nothing is known about.
    """
    if (known := lookup(key) or lookup(f"train/{key}")) is not None:
        unit = "" if known.unit == "1" else known.unit
        return Foreign(
            key, unit, _GROUPS.get(known.group, known.group), known.better, known.meaning
        )
    families = (family for family in _FAMILIES if re.fullmatch(family.key, key))
    return next(families, Foreign(key, "", "other", "none", "nothing is known about it"))


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
"""Lengths and rewards are the model's doing only where it generates; otherwise they describe
the batch.
"""


def witness_group(key: str, *, is_generating: bool) -> str | None:
    """What a metric testifies to when it jumps: rate, loss, gradient, kl, length, reward,
    policy; None: bookkeeping.
    """
    group = next((group for group, keys in _WITNESSES.items() if key in keys), None)
    if (
        group is None
        and not key.startswith(("val/", "eval/"))
        and (match := _OF_GENERATION.fullmatch(key))
    ):
        group = match.lastgroup
    return group if is_generating or group in ("rate", "loss", "gradient", "kl") else None


CHAIN_GROUPS = ("rate", "kl", "policy", "length", "reward", "gradient", "loss")
"""In the order in which one is known to cause the next, for those that set in at the same point."""
