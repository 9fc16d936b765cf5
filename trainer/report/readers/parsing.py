"""Small tolerant parsers that the readers share: JSON lines, numbers inside strings, steps, flat configurations."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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
    for block in _blocks(path, faults):
        for row in _block_rows(block, faults):
            if isinstance(row, dict):
                yield row
            else:
                faults.num_unparsed += 1


def _blocks(path: Path, faults: Faults) -> Iterator[bytes]:
    """Whole lines, many at a time."""
    rest: list[bytes] = []
    rest_bytes, is_passing_over = 0, False
    with path.open("rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            block, newline, tail = chunk.rpartition(b"\n")
            if newline:
                yield block.partition(b"\n")[2] if is_passing_over else b"".join([*rest, block])
                rest, rest_bytes, is_passing_over = [], 0, False
            if not is_passing_over:
                rest.append(tail)
                rest_bytes += len(tail)
                if rest_bytes > MAX_LINE_BYTES:
                    rest, is_passing_over = [], True
                    faults.num_unparsed += 1
    yield b"".join(rest)


def _block_rows(block: bytes, faults: Faults) -> list[Any]:
    """All lines at once as one JSON array, which takes half the time; line by line where one of them is odd."""
    try:
        rows: list[Any] = json.loads(b"[" + block.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        rows = []
    if len(rows) == block.count(b"\n") + 1:
        return rows
    return [row for line in block.split(b"\n") if not _is_blank(line) for row in _line_rows(line, faults)]


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def _line_rows(line: bytes, faults: Faults) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        faults.num_unparsed += 1
        row = _glued_row(line)
        return [] if row is None else [row]


def _glued_row(line: bytes) -> Any:
    """The whole row at the end of a line that begins with a torn one; rows of a file begin alike."""
    start = line.rfind(line[:6])
    if start <= 0:
        return None
    try:
        return json.loads(line[start:])
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=4096)
def parse_number(text: str) -> float | None:
    """The number in a string: "0.5", "46.67%", "2800/6000" (2800), "1h 2m 3s" and "1:02:03" (seconds); else None."""
    text = text.strip()
    try:
        if text[-1:] in _UNITS_S:
            return sum(float(part[:-1]) * _UNITS_S[part[-1]] for part in text.split())
        if "/" in text:
            match = _FRACTION.fullmatch(text)
            return float(match[1]) if match else None
        if ":" not in text:
            return float(text.removesuffix("%"))
    except (ValueError, KeyError):
        return None
    match = _CLOCK.fullmatch(text)
    return match and _clock_s(*match.groups())


def _clock_s(days: str | None, hours: str, minutes: str, seconds: str) -> float:
    return int(days or 0) * 86400.0 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


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
