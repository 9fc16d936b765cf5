"""The declaration of a key: a field of a frozen dataclass with its type, default, meaning and
checks in one place.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

Check = Callable[[Any], str]
"""Takes a value of the right type that is not null. Returns what is wrong, as it follows the key's
name, or ''.
"""


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key and a fix. Exit code 2."""


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """A question for the known words that a mistyped one is nearest to; '' where none is near."""
    near = [f"'{other}'" for other in difflib.get_close_matches(word, list(known), n=most)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def names_matching(pattern: str, names: Iterable[str], *, key: str, kind: str) -> list[str]:
    """Return the names in which a regular expression is found. Raises `ConfigError` if it is none,
    or if no name contains a match; `kind` says what the names are of.
    """
    known = list(names)
    try:
        found = [name for name in known if re.search(pattern, name)]
    except re.error as error:
        raise ConfigError(f"{key}: '{pattern}' is no regular expression: {error}") from error
    if not found:
        hint = did_you_mean(pattern, known) or f"they are called as {', '.join(known[:3])}"
        raise ConfigError(f"{key}: '{pattern}' is in the name of no {kind}; {hint}")
    return found


def key(default: Any, meaning: str, *checks: Check, name: str | None = None) -> Any:
    """A key that users may set; `MISSING` as default: that they must set. A list's checks see the
    whole list.

    `name`: what users write where Python does not allow that name for a field, as `for`.
    """
    metadata = {"meaning": meaning, "checks": checks, "name": name}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type) -> Any:
    """A group of keys, with all its defaults; its docstring is its meaning."""
    return field(default_factory=cls, metadata={"meaning": cls.__doc__, "checks": ()})


def declared(cls: type) -> dict[str, "Field[Any]"]:
    """The fields of a group that are keys or groups of keys, by name."""
    return {
        own.metadata.get("name") or own.name: own
        for own in fields(cls)
        if "meaning" in own.metadata
    }


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
                problem = f"must be one of {', '.join(allowed)}; got '{text}'"
                return f"{problem} ({hint})" if hint else problem
        return ""

    wrong.allowed = allowed  # type: ignore[attr-defined]  # for the JSON schema
    return wrong


def where(is_right: Callable[[Any], object], problem: str) -> Check:
    """`problem`: with `{}` for the value."""
    return lambda value: "" if is_right(value) else problem.format(value)


def at_least(least: float, *, special: int | str | None = None, means: str = "") -> Check:
    """The `special` value has a meaning of its own; `means` names it, and null where that is a
    value.
    """
    allowed = f"{means} or at least {least}" if means else f"at least {least}"
    return where(
        lambda value: value == special or (not isinstance(value, str) and value >= least),
        f"must be {allowed}, got {{}}",
    )


def at_most(most: float, why: str) -> Check:
    return where(lambda value: value <= most, f"must be at most {most} ({why}), got {{}}")


def positive(hint: str = "") -> Check:
    return where(lambda value: value > 0, f"must be positive{hint}, got {{}}")


def matches(pattern: str, words: str) -> Check:
    return where(lambda text: re.fullmatch(pattern, text), f"must be made of {words}; got '{{}}'")


def within(interval: str) -> Check:
    """`[0, 1)` holds 0 but not 1."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    open_ends = {end for end, mark in ((low, "("), (high, ")")) if mark in interval}
    return where(
        lambda value: low <= value <= high and value not in open_ends,
        f"must be in {interval}, got {{}}",
    )


def parse_duration_s(text: str) -> float:
    """Seconds in a time such as `3h30m`, `90m` or `45s`; 0 for what is none."""
    match = re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", text.strip())
    parts = match.groups("0d") if match else ()
    units_s = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(int(part[:-1]) * units_s[part[-1]] for part in parts)


not_negative = where(lambda value: value >= 0, "must not be negative, got {}")
not_empty = where(lambda value: value.strip() if isinstance(value, str) else value, "is empty")
metric_of_best = where(re.compile("val/loss|eval/.+").fullmatch, "must be val/loss or eval/NAME")
duration = where(parse_duration_s, "must be a time such as 3h30m, 90m or 45s; got '{}'")
inside_checkpoints = where(
    lambda name: ".." not in name.split("/"), "must not lead out of checkpoints/: {}"
)
"""The check of a name that is a part of a path."""
