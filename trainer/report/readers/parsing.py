"""Small tolerant parsers that the readers share: numbers inside strings, steps, names."""

import math
import re
from functools import lru_cache
from typing import Any

from trainer.metrics.words import split_reducer
from trainer.report.names import ALIASES as NAMES_OF

MAX_STEP = 2**53
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d{2}):(\d{2}(?:\.\d+)?)")
_FRACTION = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")


@lru_cache(maxsize=4096)
def parse_number(text: str) -> float | None:
    """The number in a string: "0.5", "46.67%", "2800/6000" (2800), "1h 2m 3s" and "1:02:03"
    (seconds); else None.
    """
    text = text.strip()
    try:
        if text[-1:] in _UNITS_S:
            return sum(float(part[:-1]) * _UNITS_S[part[-1]] for part in text.split())
        if "/" in text and (match := _FRACTION.fullmatch(text)):
            return float(match[1])
        if ":" in text and (match := _CLOCK.fullmatch(text)):
            return sum(
                float(part or 0) * unit
                for part, unit in zip(match.groups(), _UNITS_S.values(), strict=True)
            )
        return float(text.removesuffix("%"))
    except (ValueError, KeyError):
        return None


def as_number(value: Any) -> float | None:
    """A JSON value as a float, None where it is no number."""
    if isinstance(value, str):
        return parse_number(value) if len(value) < 64 else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_step(value: Any) -> int | None:
    """A JSON value as an optimizer step, None where it is none."""
    if type(value) is int:
        return value if 0 <= value < MAX_STEP else None
    number = as_number(value)
    return int(number) if number is not None and 0 <= number < MAX_STEP else None


def fraction_total(value: Any) -> int | None:
    """6000 of "2800/6000"."""
    match = _FRACTION.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    return as_step(int(match[2])) if match else None


ALIASES = {name: (key, 1.0) for key, names in NAMES_OF.items() for name in names} | {
    "mfu(%)": ("throughput/train/mfu", 0.01),
    # The learning rate in thousandths, as verl and we print it, and as MLflow and TensorBoard clean
    # the name.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
}
_SPELLINGS = (
    (re.compile(r"(eval/|eval_|validation/)"), "val/"),
    (re.compile(r"token/"), "tokens/"),
    # TRL and ms-swift log these without a prefix in files and with `train/` in TensorBoard; without
    # it is their name.
    (
        re.compile(
            r"train/(?=kl$|reward$|reward_std$|frac_reward_zero_std$|rewards/|completions/|clip_ratio)"
        ),
        "",
    ),
)
"""How names begin elsewhere -> how ours do."""


def canonical(name: str) -> tuple[str, float]:
    """Our key for a name in any log, and the factor that brings its values to our unit."""
    name, _ = split_reducer(name)
    if name.startswith(("Train/", "Val/", "Eval/", "Validation/")):
        name = name.lower()
    for theirs, ours in _SPELLINGS:
        if match := theirs.match(name):
            name = ours + name[match.end() :]
    return ALIASES.get(name, (name, 1.0))
