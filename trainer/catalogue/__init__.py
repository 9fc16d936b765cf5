"""The metrics of training by name: what each is, its unit, how it is reduced, when it is logged and what is good.

`metrics.txt` holds them, one entry a metric; docs/metrics.md and `python -m trainer.cli.metrics` show them.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

GROUPS = {
    "optimisation": "loss, gradient, learning rate, policy",
    "validation": "loss on held-out data",
    "reward": "rewards, advantages, scores",
    "length": "lengths of samples and of generated answers",
    "data": "what the batches are made of",
    "timing": "where the time goes, throughput",
    "memory": "of devices and hosts",
    "state": "progress, restarts, checkpoints",
    "guard": "online detection of anomalies",
    "other": "hardware, and what watching costs",
}
REDUCERS = {
    "sum": "sum over ranks",
    "mean": "mean over all ranks, each counting with its tokens or samples",
    "max": "largest of all ranks",
    "min": "smallest of all ranks",
    "last": "as rank 0 has it",
    "norm": "root of the sum of squares over all ranks",
    "std": "standard deviation over all ranks",
    "p50": "median over all ranks",
    "p95": "95th percentile over all ranks",
    "p99": "99th percentile over all ranks",
}
DIRECTIONS = {
    "down": "lower is better",
    "up": "higher is better",
    "middle": "a middle range is best",
    "none": "neither end is better",
}
DOMAINS = {"sft": "supervised fine-tuning", "rl": "reinforcement learning", "any": "both"}
CADENCES = {
    "step": "every step",
    "eval": "every validation",
    "checkpoint": "every checkpoint",
    "epoch": "every epoch",
    "rare": "every 50 steps",
    "timer": "every 10 s",
    "event": "when it happens",
}
PLACEHOLDERS = {
    "<source>": (".+", "name of a data source"),
    "<group>": (".+", "name of a parameter group"),
    "<block>": (".+", "name of a layer block"),
    "<name>": (".+", "name of a reward function"),
    "<phase>": (r"\w+", "a phase of the step: data, h2d, forward, backward, optimizer, logging, guard, other"),
    "<infix>": (r"[^/]+/[^/]+", "cluster and operation: sft/train_step, sft/do_checkpoint, sft/eval"),
    "<edge>": ("start|end", "start or end of the operation"),
    "<place>": ("offload|onload", "offload or onload: before or after states come to the device, or leave it"),
    "<device>": (r"\d+", "number of the device"),
}
"""Part of a key that differs from run to run -> what it matches, and what it means."""
STATUS = {"emitted": "computed by this trainer", "declared": "known by name only"}
_LINE = re.compile(r"S[0-4]\.\d+")


@dataclass(frozen=True)
class Metric:
    """One metric; its words are keys of the tables above."""

    key: str
    """As it is logged; may hold placeholders."""
    group: str
    unit: str
    """1 = pure number, share = 0 to 1."""
    reducer: str
    direction: str
    domain: str
    cadence: str
    is_emitted: bool
    """This trainer computes it; otherwise its name is known, for those who log it and for logs of other trainers."""
    meaning: str
    lines: tuple[str, ...] = ()
    """Of the acceptance list, such as S3.5."""
    config: tuple[str, ...] = ()
    """Configuration keys that switch or shape it."""


def parse(text: str) -> Iterator[Metric]:
    """The metrics of a text in the form of metrics.txt. Raises `ValueError` naming the entry that is wrong."""
    group = ""
    for entry in re.split(r"\n(?=\S)", text):
        head, *details = (line.strip() for line in entry.splitlines() if line.strip())
        if head.startswith("["):
            group = head.strip("[]")
        elif not head.startswith("#"):
            yield _metric(group, head, details)


def _metric(group: str, head: str, details: list[str]) -> Metric:
    try:
        key, unit, reducer, direction, domain, cadence, status = head.split()
        meaning, references = details if len(details) == 2 else (*details, "")
    except ValueError as error:
        raise ValueError(f"'{head}': needs seven words, then a line of meaning, then at most one of links") from error
    words: list[tuple[str, Collection[str]]] = [
        (group, GROUPS),
        (reducer, REDUCERS),
        (direction, DIRECTIONS),
        (domain, DOMAINS),
        (cadence, CADENCES),
        (status, STATUS),
        *((placeholder, PLACEHOLDERS) for placeholder in re.findall("<.*?>", key)),
    ]
    for word, known in words:
        if word not in known:
            raise ValueError(f"'{head}': '{word}' is none of {', '.join(known)}")
    links = references.split()
    return Metric(
        key=key,
        group=group,
        unit=unit,
        reducer=reducer,
        direction=direction,
        domain=domain,
        cadence=cadence,
        is_emitted=status == "emitted",
        meaning=meaning,
        lines=tuple(link for link in links if _LINE.fullmatch(link)),
        config=tuple(link for link in links if not _LINE.fullmatch(link)),
    )


CATALOGUE: tuple[Metric, ...] = tuple(parse((Path(__file__).parent / "metrics.txt").read_text(encoding="utf-8")))
_EXACT = {metric.key: metric for metric in CATALOGUE}


def split_reducer(key: str) -> tuple[str, str | None]:
    """`tokens@sum` -> (`tokens`, `sum`); a key without such a suffix comes back as it is, with None."""
    name, _, reducer = key.rpartition("@")
    return (name, reducer) if name and reducer in REDUCERS else (key, None)


@lru_cache(maxsize=4096)
def lookup(key: str) -> Metric | None:
    """What is known about a logged key: the metric of that name, else the one whose placeholders fit, else None.

    `eval/` is another spelling of `val/`; some trainers put either or `train/` before names that are declared without.
    A suffix such as `@sum` names the reducer in place of the usual one.
    """
    name, reducer = split_reducer(key)
    place, _, rest = name.partition("/")
    metric = _find(name) or (_find(f"val/{rest}") if place == "eval" else None)
    if metric is None and place in ("train", "val", "eval"):
        bare = _find(rest)
        metric = bare if bare is not None and not bare.is_emitted else None
    return metric if metric is None or reducer is None else replace(metric, reducer=reducer)


def _find(name: str) -> Metric | None:
    return _EXACT.get(name) or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def _pattern(key: str) -> re.Pattern[str]:
    parts = re.split("(<.*?>)", key)
    return re.compile(
        "".join(f"(?:{PLACEHOLDERS[part][0]})" if part in PLACEHOLDERS else re.escape(part) for part in parts)
    )


_PATTERNS = [(_pattern(metric.key), metric) for metric in CATALOGUE if "<" in metric.key]
