"""What becomes of a setting, and what a rule may ask of the others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BECAME, NOTHING, DIFFERS, NO_EQUAL, UNKNOWN = "became", "changes nothing", "differs", "no equal", "unknown"


@dataclass(frozen=True)
class ForeignSetting:
    """A key of the other trainer; `line` of the file, None for a default of that trainer."""

    key: str
    value: Any
    line: int | None = None


@dataclass(frozen=True)
class Answer:
    """`words`: our keys and their values; `text` says what they leave unsaid."""

    kind: str
    text: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """All settings of a file, with the defaults of its trainer for what it leaves open.

    `num_ranks`: those of its launch, if known; `mean_tokens` of a row, if given, for packed sequences.
    """

    settings: Mapping[str, ForeignSetting]
    num_ranks: int | None
    mean_tokens: float | None

    def value(self, key: str, default: Any = None) -> Any:
        """`default` also for null."""
        setting = self.settings.get(key)
        return default if setting is None or setting.value is None else setting.value

    def has(self, keys: Iterable[str]) -> bool:
        return any(self.value(key) for key in keys)


Rule = Callable[[Given, Any], Answer]
"""From the settings and the value of one of them."""


def became(text: str = "", /, **words: Any) -> Answer:
    """A word `data__max_length` stands for `data.max_length`."""
    return Answer(BECAME, text, {name.replace("__", "."): value for name, value in words.items()})


def differs(text: str, /, **words: Any) -> Answer:
    return Answer(DIFFERS, text, became(**words).words)


def nothing(text: str = "") -> Answer:
    return Answer(NOTHING, text)


def no_equal(text: str) -> Answer:
    return Answer(NO_EQUAL, text)
