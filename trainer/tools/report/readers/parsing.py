"""Small tolerant parsers that the readers share: numbers inside strings, steps, names."""

import math
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from trainer.tools.report.names import ALIASES
from trainer.tracking.metrics.words import split_reducer

MAX_STEP = 2**53
MAX_CHARACTERS = 64
"""Of a string that may be a number."""
UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
STEP_KEYS = (
    *("global_step/max_steps", "step", "global_step", "trainer/step", "trainer/global_step"),
    *("train/global_step", "_step", "current_steps", "current_iteration", "iteration", "iter"),
    *("last_step", "steps", "Step", "epoch"),
)
"""Columns that can be the x axis, best first."""


def step_key(names: Collection[str]) -> str | None:
    """Return the best x axis among the columns of a row or table."""
    return next((key for key in STEP_KEYS if key in names), None)


@lru_cache(maxsize=4096)
def parse_number(text: str) -> float | None:
    """Return the number in "0.5", "46.67%", "2800/6000" (2800) or "1h 2m 3s" (seconds), else None."""
    text = text.strip()
    try:
        if text[-1:] in UNITS_S:
            return sum(float(part[:-1]) * UNITS_S[part[-1]] for part in text.split())
        if match := re.fullmatch(r"(\d+)\s*/\s*\d+", text):
            return float(match[1])
        return float(text.removesuffix("%"))
    except (ValueError, KeyError):
        return None


def as_number(value: Any) -> float | None:
    """Return a JSON value as a float, None where it is no number."""
    if isinstance(value, str):
        return parse_number(value) if len(value) < MAX_CHARACTERS else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_step(value: Any) -> int | None:
    """Return a JSON value as an optimizer step, None where it is none."""
    number = as_number(value)
    return int(number) if number is not None and 0 <= number < MAX_STEP else None


def fraction_total(value: Any) -> int | None:
    """Return 6000 for "2800/6000"."""
    return as_step(value.partition("/")[2]) if isinstance(value, str) else None


OURS = {name: (key, 1.0) for key, names in ALIASES.items() for name in names} | {
    "mfu(%)": ("throughput/train/mfu", 0.01),
    # The learning rate in thousandths, as verl and we print it; TensorBoard cleans the name.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
}
"""Another name -> our key, and the factor to our unit."""
SPELLINGS = {
    "^(eval/|eval_|validation/)": "val/",
    "^token/": "tokens/",
    # TRL and ms-swift log these without a prefix in files and with `train/` in TensorBoard.
    "^train/(?=(kl|reward|reward_std|frac_reward_zero_std)$|rewards/|completions/|clip_ratio)": "",
}
"""Beginnings of other trainers' names -> ours."""


def canonical(name: str) -> tuple[str, float]:
    """Return our key for a name in any log, and the factor to our unit."""
    name, _ = split_reducer(name)
    if name.startswith(("Train/", "Val/", "Eval/", "Validation/")):
        name = name.lower()
    for theirs, ours in SPELLINGS.items():
        name = re.sub(theirs, ours, name)
    return OURS.get(name, (name, 1.0))
