"""Results of long commands as JSON files for the repository: a record to a line, floats with
four digits.
"""

import json
from pathlib import Path
from typing import Any

WIDTH = 400
DIGITS = 4


def write_result(path: Path, result: Any) -> None:
    path.write_text(as_text(result), encoding="utf-8")


def as_text(result: Any) -> str:
    return _text(_rounded(result), indent=0) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _text(value: Any, *, indent: int) -> str:
    """On one line what fits there, else one item to a line."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    margin = " " * (indent + 1)
    if isinstance(value, dict):
        named = ((json.dumps(key, ensure_ascii=False), item) for key, item in value.items())
        items = [f"{key}: {_text(item, indent=indent + 1)}" for key, item in named]
        begin, end = "{", "}"
    else:
        items = [_text(item, indent=indent + 1) for item in value]
        begin, end = "[", "]"
    return f"{begin}\n{margin}" + f",\n{margin}".join(items) + f"\n{' ' * indent}{end}"
