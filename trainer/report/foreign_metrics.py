"""Metrics that other trainers log: names and meanings for reading their logs, and for who logs them through `Tracking`.

This trainer computes none of them; what it does stands in `trainer.metrics`.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files

from trainer import metrics
from trainer.metrics.words import Better, Metric, pattern, split_reducer


@dataclass(frozen=True)
class Foreign:
    key: str
    """May hold placeholders, as those of `trainer.metrics`."""
    unit: str
    group: str
    better: Better
    meaning: str


def _read() -> tuple[Foreign, ...]:
    text = files("trainer.report").joinpath("foreign_metrics.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(Foreign(**row) for row in rows)  # type: ignore[arg-type]


FOREIGN = _read()
_EXACT = {metric.key: metric for metric in FOREIGN}
_PATTERNS = [metric for metric in FOREIGN if "<" in metric.key]


def lookup(key: str) -> Metric | Foreign | None:
    """What is known about a key in any log: of our own metrics, else of other trainers'.

    `eval/` is another spelling of `val/`; some trainers put either or `train/` before names that stand here without. A
    suffix such as `@sum` is taken off.
    """
    name, _ = split_reducer(key)
    place, _, rest = name.partition("/")
    found = _find(name) or (_find(f"val/{rest}") if place == "eval" else None)
    return found or (_foreign(rest) if place in ("train", "val", "eval") else None)


def _find(name: str) -> Metric | Foreign | None:
    return metrics.find(name) or _foreign(name)


def _foreign(name: str) -> Foreign | None:
    return _EXACT.get(name) or next((metric for metric in _PATTERNS if pattern(metric.key).fullmatch(name)), None)
