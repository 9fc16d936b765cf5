"""Declares keys. A key is a field of a frozen dataclass with type, default, meaning and checks."""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeGuard

Check = Callable[[Any], str]
"""A function that takes a value of the key's type, never null, and returns '' or a problem. The
message puts the key's name before the problem.
"""


class ConfigError(ValueError):
    """The user's configuration is wrong. The message names the key and a fix. Exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that suggests the known word closest to a mistyped one; '' if none is
    similar.
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def names_matching(
    pattern: str,
    names: Iterable[str],
    *,
    key: str,
    kind: str,
) -> list[str]:
    """Return the names that contain a match of a regular expression. Raises `ConfigError` for an
    invalid expression, and if no name matches.

    Error messages contain `key` and `kind` (the things that have the names).
    """
    known = list(names)
    try:
        found = [name for name in known if re.search(pattern, name)]
    except re.error as error:
        raise ConfigError(f"{key}: '{pattern}' is not a regular expression: {error}") from error
    if not found:
        hint = did_you_mean(pattern, known) or f"examples of names: {', '.join(known[:3])}"
        raise ConfigError(f"{key}: no {kind} has a name that matches '{pattern}'; {hint}")
    return found


def key(
    default: Any,
    meaning: str,
    *checks: Check,
    name: str | None = None,
) -> Any:
    """Declare a key. Users must set it if the default is `dataclasses.MISSING`.

    `name` is the user's name for the key, if Python does not allow it as a field name.
    """
    metadata = {"meaning": meaning, "checks": checks, "name": name}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type) -> Any:
    """Declare a group of keys. The class's docstring is its meaning."""
    return field(default_factory=cls, metadata={"meaning": cls.__doc__, "checks": ()})


def is_group(kind: Any) -> TypeGuard[type]:
    """Return True if a field of this type is a group of keys."""
    return isinstance(kind, type) and is_dataclass(kind)


def declared(cls: type) -> dict[str, "Field[Any]"]:
    """Return the keys and subgroups of a group, by the names that users write."""
    return {
        own.metadata.get("name") or own.name: own
        for own in fields(cls)
        if "meaning" in own.metadata
    }


def keys_of(cls: type, prefix: str = "") -> dict[str, "Field[Any]"]:
    """Return all keys below a group by their dotted names, in the order of their declaration."""
    found: dict[str, Field[Any]] = {}
    for name, own in declared(cls).items():
        dotted = f"{prefix}{name}"
        if is_group(own.type):
            found |= keys_of(own.type, f"{dotted}.")
        else:
            found[dotted] = own
    return found


def one_of(*allowed: str) -> Check:
    """Allow these words, and lists of them. A bool counts as its YAML spelling."""

    def check(value: Any) -> str:
        for item in value if isinstance(value, list) else [value]:
            text = str(item).lower() if isinstance(item, bool) else item
            if text not in allowed:
                hint = did_you_mean(str(text), allowed)
                return f"must be one of {', '.join(allowed)}; got '{text}' {hint}".rstrip()
        return ""

    check.allowed = allowed  # type: ignore[attr-defined]  # for the JSON schema
    return check


def where(is_right: Callable[[Any], object], problem: str) -> Check:
    """Allow values for which `is_right` returns true. `{}` in `problem` becomes the value."""
    return lambda value: "" if is_right(value) else problem.format(value)


def at_least(least: float, *, special: int | None = None) -> Check:
    """Allow the number `special`, and numbers of at least `least`."""
    allowed = f"at least {least}" if special is None else f"{special} or at least {least}"
    return where(lambda value: value == special or value >= least, f"must be {allowed}, got {{}}")


def within(interval: str) -> Check:
    """Allow numbers in an interval: `[0, 1)` contains 0 but not 1."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    excluded = []
    if interval.startswith("("):
        excluded.append(low)
    if interval.endswith(")"):
        excluded.append(high)
    return where(
        lambda value: low <= value <= high and value not in excluded,
        f"must be in {interval}, got {{}}",
    )


def parse_duration_s(text: str | None) -> float:
    """Return the seconds of a duration such as `3h30m`, `90m` or `45s`; infinity for None, 0 for
    any other text.
    """
    if text is None:
        return math.inf
    if not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", text.strip()):
        return 0.0
    units_s = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(int(number) * units_s[unit] for number, unit in re.findall(r"(\d+)(\w)", text))


not_negative = at_least(0)
positive = within("(0, inf)")
count_or_all = at_least(1, special=-1)
not_empty = where(lambda value: value.strip() if isinstance(value, str) else value, "is empty")
duration = where(parse_duration_s, "must be a duration such as 3h30m, 90m or 45s; got '{}'")
inside_checkpoints = where(
    lambda name: ".." not in name.split("/"), "must not point outside checkpoints/, got '{}'"
)
"""The check of a name that becomes part of a path."""
