"""Small tolerant parsers that the readers share: JSON lines, numbers inside strings, steps, names."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.metrics.words import split_reducer
from trainer.report.rule_table import table

MAX_LINE_BYTES = 2**26
"""A longer line is passed over: no row of metrics is that long, and it must not fill the memory."""
BLOCK_BYTES = 2**17
MAX_STEP = 2**53

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d{2}):(\d{2}(?:\.\d+)?)")
_FRACTION = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")


@dataclass
class Faults:
    """What a reader had to pass over."""

    num_unparsed: int = 0


def json_rows(path: Path, faults: Faults) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. Blank lines are skipped, other lines counted as unparsed."""
    for lines in _blocks(path, faults):
        for row in _block_rows(lines, faults):
            if isinstance(row, dict):
                yield row
            else:
                faults.num_unparsed += 1


def _blocks(path: Path, faults: Faults) -> Iterator[list[bytes]]:
    """Whole lines, many at a time."""
    lines: list[bytes] = []
    num_bytes, is_passing_over = 0, False
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            is_part = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if is_part or is_passing_over:
                faults.num_unparsed += not is_passing_over
                is_passing_over = is_part
                continue
            lines.append(line)
            num_bytes += len(line)
            if num_bytes >= BLOCK_BYTES:
                yield lines
                lines, num_bytes = [], 0
    yield lines


def _block_rows(lines: list[bytes], faults: Faults) -> list[Any]:
    """All lines at once as one JSON array, which takes half the time; line by line where one of them is odd."""
    rows = _parsed(b"[" + b",".join(lines) + b"]")
    if rows is not None and len(rows) == len(lines):
        return list(rows)
    return [row for line in lines if line.strip() for row in _line_rows(line, faults)]


def _line_rows(line: bytes, faults: Faults) -> list[Any]:
    """The row of a line; of one that begins with a torn row the whole one at its end: rows of a file begin alike."""
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        faults.num_unparsed += 1
    start = line.rfind(line[:6])
    row = _parsed(line[start:]) if start > 0 else None
    return [] if row is None else [row]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=4096)
def parse_number(text: str) -> float | None:
    """The number in a string: "0.5", "46.67%", "2800/6000" (2800), "1h 2m 3s" and "1:02:03" (seconds); else None."""
    text = text.strip()
    try:
        if text[-1:] in _UNITS_S:
            return sum(float(part[:-1]) * _UNITS_S[part[-1]] for part in text.split())
        if "/" in text and (match := _FRACTION.fullmatch(text)):
            return float(match[1])
        if ":" in text and (match := _CLOCK.fullmatch(text)):
            return sum(float(part or 0) * unit for part, unit in zip(match.groups(), _UNITS_S.values(), strict=True))
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


ALIASES = {name: (key, 1.0) for key, names in table()["aliases"].items() for name in names} | {
    "mfu(%)": ("throughput/train/mfu", 0.01),
    # The learning rate in thousandths, as verl and we print it, and as MLflow and TensorBoard clean the name.
    "train/lr(1e-3)": ("train/lr", 1e-3),
    "train/lr_1e-3": ("train/lr", 1e-3),
    "train/lr_1e-3_": ("train/lr", 1e-3),
}
_RL = re.compile(r"train/(kl$|reward$|reward_std$|frac_reward_zero_std$|rewards/|completions/|clip_ratio)")
"""TRL and ms-swift log these without a prefix in files and with `train/` in TensorBoard; without it is their name."""


def canonical(name: str) -> tuple[str, float]:
    """Our key for a name in any log, and the factor that brings its values to our unit."""
    name, _ = split_reducer(name)
    if name.startswith(("Train/", "Val/", "Eval/", "Validation/")):
        name = name.lower()
    for prefix in ("eval/", "eval_", "validation/"):
        if name.startswith(prefix):
            name = "val/" + name.removeprefix(prefix)
    if name.startswith("token/"):
        name = "tokens/" + name.removeprefix("token/")
    if _RL.match(name):
        name = name.removeprefix("train/")
    return ALIASES.get(name, (name, 1.0))
