"""Tolerant parsers for the contents of logs: numbers in strings, step columns, metric names."""

import re
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache

from trainer.tools.report.names import ALIASES, STEP_KEYS, SYNONYMS, WORDS
from trainer.tracking.metrics.words import split_reducer

MAX_STEP = 2**53
MAX_NUMBER_LENGTH = 64
"""A string of this length or more is not parsed as a number."""
UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)")
BOOKKEEPING = {*STEP_KEYS, "attempt", "total_steps", "timestamp"} - {"epoch"}
"""Columns that are not metrics."""
OUR_NAMES = {name: key for key, names in ALIASES.items() for name in names}
MIRRORS = {
    "memory(%)": ("memory/max_reserved_frac", 0.01),  # of torchtitan
    "mfu(%)": ("throughput/train/mfu", 0.01),
    # verl and our console log the learning rate in thousandths; TensorBoard replaces the brackets.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
    "elapsed time per iteration (ms)": ("train/time(s)", 1e-3),  # of Megatron
}
"""Name of a metric in a different unit -> our key, and the factor that converts to our unit."""
SPELLINGS = {
    # W&B puts the name of the run before a metric when it exports a panel.
    "^.* - ": "",
    "^(eval/|eval_|validation/)": "val/",
    "^token/": "tokens/",
    # TRL and ms-swift log these without a prefix in files and with `train/` in TensorBoard.
    "^train/(?=(kl|reward|reward_std|frac_reward_zero_std)$|rewards/|completions/|clip_ratio)": "",
    r" \(GiB\)$": "_gib",  # of axolotl
}
"""Pattern in other trainers' names -> our spelling."""


def step_key(names: Collection[str]) -> str | None:
    """Return the best step column of a row or table; None if it has none."""
    return next((key for key in STEP_KEYS if key in names), None)


def as_number(value: object) -> float | None:
    """Return a cell as a float; None if it is not a number."""
    if isinstance(value, str):
        return _parse_number(value) if len(value) < MAX_NUMBER_LENGTH else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return None


@lru_cache(maxsize=4096)
def _parse_number(text: str) -> float | None:
    """Parse "0.5", "46.67%", "2800/6000" (2800), "1h 2m 3s" or "1 day, 2:03:04" (seconds)."""
    if clock := CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    done, _, total = text.partition("/")
    text = (done if total.strip().isdecimal() else text).rstrip(" %")
    with suppress(ValueError, KeyError):
        if text[-1:] in UNITS_S:
            return sum(float(part[:-1]) * UNITS_S[part[-1]] for part in text.split())
        return float(text)
    return None


def as_step(value: object) -> int | None:
    """Return a cell as an optimizer step; None if it is not one."""
    number = as_number(value)
    return int(number) if number is not None and 0 <= number < MAX_STEP else None


def canonical(name: str) -> tuple[str, float]:
    """Return our key for a metric name from any log, and the factor that converts to our unit."""
    name, _ = split_reducer(name)
    if name.startswith(("Train/", "Val/", "Eval/", "Validation/")):
        name = name.lower()
    for theirs, ours in SPELLINGS.items():
        name = re.sub(theirs, ours, name)
    return MIRRORS.get(name, (OUR_NAMES.get(name, name), 1.0))


def guessed(name: str) -> str | None:
    """Guess our key for a metric that is in no table, from the words in its name; None if they do
    not identify it.
    """
    text = re.sub(r"(?<=[a-z])(?=[A-Z][A-Za-z])", "_", name).lower()
    text = re.sub("learn(ing)?.?rate", "lr", text)
    words = {SYNONYMS.get(word, word) for word in re.findall("[a-z]+|%", text)}
    for key, groups, allowed in WORDS:
        if words <= allowed and all(map(words.intersection, groups)):
            return key
    return None
