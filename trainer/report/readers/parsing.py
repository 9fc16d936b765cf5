"""Small tolerant parsers that the readers share: JSON lines, numbers inside strings, steps, flat configurations."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 2**26
"""A longer line is passed over: no row of metrics is that long, and it must not fill the memory."""
MAX_STEP = 2**53

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms] ?)+")
_CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d{2}):(\d{2}(?:\.\d+)?)")
_FRACTION = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")


class UnreadableLogError(ValueError):
    """No reader understands the path; the message names it, what was tried, and the fix."""


@dataclass
class Faults:
    """What a reader had to pass over."""

    num_unparsed: int = 0


def json_rows(path: Path, faults: Faults) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. Blank lines are skipped, other lines counted as unparsed."""
    with path.open("rb") as file:
        read_line = partial(file.readline, MAX_LINE_BYTES)
        for line in iter(read_line, b""):
            if len(line) == MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = read_line()
                faults.num_unparsed += 1
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if line.isspace():
                    continue
                faults.num_unparsed += 1
                row = _glued_row(line)
                if row is None:
                    continue
            if isinstance(row, dict):
                yield row
            else:
                faults.num_unparsed += 1


def _glued_row(line: bytes) -> Any:
    """The whole row at the end of a line that begins with a torn one; rows of a file begin alike."""
    start = line.rfind(line[:6])
    if start <= 0:
        return None
    try:
        return json.loads(line[start:])
    except (ValueError, RecursionError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file, {} without one or where it is broken: what it says is an extra."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@lru_cache(maxsize=4096)
def parse_number(text: str) -> float | None:
    """The number in a string: "0.5", "46.67%", "2800/6000" (2800), "1h 2m 3s" and "1:02:03" (seconds); else None."""
    text = text.strip()
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        pass
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = match.groups()
        return int(days or 0) * 86400.0 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if _DURATION.fullmatch(text):
        return math.fsum(float(part[:-1]) * _UNITS_S[part[-1]] for part in re.findall(r"[\d.]+[dhms]", text))
    match = _FRACTION.fullmatch(text)
    return float(match[1]) if match else None


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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted names; at most 32 levels, deeper ones stay as they are."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.count(".") < 32:
            leaves |= flat(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def first_step(values: Iterable[Any]) -> int | None:
    """The first of `values` that is a step, 0 excluded: how totals are planned."""
    return next((step for value in values if (step := as_step(value))), None)
