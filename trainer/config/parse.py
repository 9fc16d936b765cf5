"""From a resolved mapping to a typed `Config`; a mistyped key is answered with the nearest known one."""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any

from trainer.config.foreign import find_foreign
from trainer.config.schema import Config, ConfigError

MIN_ALIKE, SAME_GROUP = 0.7, 0.1
"""How like a last part must be (`difflib`, 1 = equal) to be offered in the same group; in another, by so much more."""


def known_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """All dotted leaf keys, in the order of the schema."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if name == "resolved":
            continue
        dotted = f"{prefix}{name}"
        keys += known_keys(hint, f"{dotted}.") if dataclasses.is_dataclass(hint) else [dotted]
    return keys


def nearest_key(dotted: str) -> str | None:
    """The known key that a mistyped one is near to by its last part, more so one of the same group; else None."""
    group, _, leaf = dotted.rpartition(".")

    def nearness(key: str) -> float:
        own_group, _, own_leaf = key.rpartition(".")
        alike = difflib.SequenceMatcher(None, leaf, own_leaf).ratio()
        return alike + SAME_GROUP * (group == own_group) if alike >= MIN_ALIKE else 0.0

    nearest = max(known_keys(), key=nearness)
    return nearest if nearness(nearest) >= MIN_ALIKE + SAME_GROUP else None


def unknown_key_error(dotted: str, value: str | None = None) -> ConfigError:
    """What the key is here if it is another trainer's, else the nearest of ours, if any is near."""
    foreign = find_foreign(dotted)
    if foreign is not None:
        named = dotted if value is None else f"{dotted}={value}"
        instead = foreign.own_key or foreign.advice(value)
        return ConfigError(f"unknown configuration key '{named}' (of {foreign.origin}); here: {instead}")
    nearest = nearest_key(dotted)
    hint = f"did you mean '{nearest}'?" if nearest else "there is no key like it; bash run_sft.sh --help lists all"
    return ConfigError(f"unknown configuration key '{dotted}': {hint}")


def build(cls: Any, tree: Any, *, prefix: str, skip: tuple[str, ...] = ()) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"'{prefix.rstrip('.')}' must be a group of keys, got {tree!r}")
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name not in skip}
    for name in tree:
        if name not in hints:
            raise unknown_key_error(f"{prefix}{name}", None if isinstance(tree[name], dict) else str(tree[name]))
    values = {}
    for name, hint in hints.items():
        dotted = f"{prefix}{name}"
        if name not in tree:
            raise ConfigError(f"missing configuration key '{dotted}' (conf/sft.yaml holds its default)")
        if dataclasses.is_dataclass(hint):
            values[name] = build(hint, tree[name], prefix=f"{dotted}.")
        else:
            values[name] = _coerce(tree[name], hint, dotted)
    return cls(**values)


def _coerce(value: Any, hint: Any, dotted: str) -> Any:
    """Check `value` against `hint`; numbers written as text (`1e-5`) and whole floats are accepted where they fit."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        for option in typing.get_args(hint):
            if option is not type(None):
                try:
                    return _coerce(value, option, dotted)
                except ConfigError:
                    continue
    elif origin is list:
        if isinstance(value, list | tuple):
            return [_coerce(item, typing.get_args(hint)[0], dotted) for item in value]
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return [_coerce(value, typing.get_args(hint)[0], dotted)]
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if hint is float and number == number:
            return number
        if hint is int and math.isfinite(number) and number == int(number):
            return int(number)
    elif hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    name = getattr(hint, "__name__", None) or str(hint)
    raise ConfigError(f"'{dotted}' must be {name if origin is None else hint}, got {value!r}")
