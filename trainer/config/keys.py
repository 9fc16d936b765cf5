"""How a key is declared: a field of a frozen dataclass with its type, default, meaning and checks in one place."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

Check = Callable[[Any], str]
"""Of a value that has the right type and is not null: what is wrong, as it follows the key's name, or ''."""


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key and a fix. Exit code 2."""


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """A question for the known words that a mistyped one is nearest to; '' where none is near."""
    near = [f"'{other}'" for other in difflib.get_close_matches(word, list(known), n=most)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def key(default: Any, meaning: str, *checks: Check) -> Any:
    """A key that users may set; `MISSING` as default: that they must set. A list's checks see the whole list."""
    metadata = {"meaning": meaning, "checks": checks}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type) -> Any:
    """A group of keys, with all its defaults; its docstring is its meaning."""
    return field(default_factory=cls, metadata={"meaning": cls.__doc__, "checks": ()})


def declared(cls: type) -> dict[str, "Field[Any]"]:
    """The fields of a group that are keys or groups of keys, by name."""
    return {own.name: own for own in fields(cls) if "meaning" in own.metadata}


def keys_of(cls: type, prefix: str = "") -> dict[str, "Field[Any]"]:
    """All keys below a group by their dotted names, in the order of their declaration."""
    found: dict[str, Field[Any]] = {}
    for name, own in declared(cls).items():
        dotted = f"{prefix}{name}"
        found |= keys_of(own.type, f"{dotted}.") if is_dataclass(own.type) else {dotted: own}  # type: ignore[arg-type]
    return found


def one_of(*allowed: str) -> Check:
    """A bool counts as it is written in YAML; each item of a list is one of them."""

    def wrong(value: Any) -> str:
        for item in value if isinstance(value, list) else [value]:
            text = str(item).lower() if isinstance(item, bool) else item
            if text not in allowed:
                hint = did_you_mean(text, allowed)
                return f"must be one of {', '.join(allowed)}; got '{text}'" + (f" ({hint})" if hint else "")
        return ""

    return wrong


def at_least(least: float, *, special: int | str | None = None, means: str = "") -> Check:
    """The `special` value has a meaning of its own; `means` names it, and null where that is a value."""
    allowed = f"{means} or at least {least}" if means else f"at least {least}"

    def wrong(value: Any) -> str:
        is_right = value == special or (not isinstance(value, str) and value >= least)
        return "" if is_right else f"must be {allowed}, got {value}"

    return wrong


def at_most(most: float, why: str) -> Check:
    return lambda value: "" if value <= most else f"must be at most {most} ({why}), got {value}"


def within(interval: str) -> Check:
    """`[0, 1)` holds 0 but not 1."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def wrong(value: float) -> str:
        is_above = value >= low if interval[0] == "[" else value > low
        is_below = value <= high if interval[-1] == "]" else value < high
        return "" if is_above and is_below else f"must be in {interval}, got {value}"

    return wrong


def positive(hint: str = "") -> Check:
    return lambda value: "" if value > 0 else f"must be positive{hint}, got {value}"


def not_negative(value: float) -> str:
    return "" if value >= 0 else f"must not be negative, got {value}"


def metric_of_best(value: str) -> str:
    is_known = value == "val/loss" or (value.startswith("eval/") and len(value) > len("eval/"))
    return "" if is_known else "must be val/loss or eval/NAME"


def not_empty(value: Any) -> str:
    return "" if (value.strip() if isinstance(value, str) else value) else "is empty"


def matches(pattern: str, words: str) -> Check:
    return lambda text: "" if re.fullmatch(pattern, text) else f"must be made of {words}; got '{text}'"


def inside_checkpoints(name: str) -> str:
    """For a name that is a part of a path."""
    return f"must not lead out of checkpoints/: {name}" if ".." in name.split("/") else ""


def duration(text: str) -> str:
    return "" if parse_duration_s(text) else f"must be a time such as 3h30m, 90m or 45s; got '{text}'"


def parse_duration_s(text: str) -> float:
    """Seconds in a time such as `3h30m`, `90m` or `45s`; 0 for what is none."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
