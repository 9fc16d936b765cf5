"""Keys of other trainers on the command line: what they are here, from `foreign_keys.txt` (one row a key)."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("foreign_keys.txt")


@dataclass(frozen=True)
class ForeignKey:
    """A row of the table; `unchanged`: values that change nothing here, `*` for all."""

    pattern: str
    origin: str
    unchanged: tuple[str, ...]
    here: str

    @property
    def own_key(self) -> str | None:
        """Our key of the same meaning."""
        return self.here.removeprefix("= ") if self.here.startswith("= ") else None

    def matches(self, dotted: str) -> bool:
        return fnmatchcase(dotted if "." in self.pattern else dotted.rsplit(".", 1)[-1], self.pattern)

    def changes_nothing(self, value: str) -> bool:
        plain = value.strip("'\"").lower()
        return "*" in self.unchanged or ("null" if plain in ("", "none", "~") else plain) in self.unchanged

    def advice(self, value: str | None) -> str:
        """What to do instead; `value` is what was given."""
        return self.here.replace("{value}", "VALUE" if value is None else value)


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    return tuple(_rows(TABLE.read_text(encoding="utf-8")))


def find_foreign(dotted: str, origins: Sequence[str] = ()) -> ForeignKey | None:
    """The row of a key; of several the one of the first of `origins`, then the first."""
    rows = [row for row in foreign_keys() if row.matches(dotted)]
    return min(rows, key=lambda row: (*origins, row.origin).index(row.origin), default=None)


def own_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without those of other trainers that change nothing here, and with our key where
    another has the same meaning; each is said in a line on stderr. All other words stay as they are.
    """
    return [own for word in words for own in _own_word(word)]


def _own_word(word: str) -> Iterator[str]:
    key, equals, value = word.lstrip("+").partition("=")
    row = find_foreign(key) if equals and not word.startswith("-") else None
    if row is None or row.own_key == key:
        yield word
    elif row.own_key is not None:
        _say(f"{key}={value} (of {row.origin}) is taken as {row.own_key}={value}")
        yield f"{row.own_key}={value}"
    elif row.changes_nothing(value):
        why = f": {row.advice(value)}" if "*" in row.unchanged else ""
        _say(f"{key}={value} (of {row.origin}) changes nothing here{why}")
    else:
        yield word


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _rows(text: str) -> Iterator[ForeignKey]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, origin, unchanged, here = (cell.strip() for cell in line.split("|"))
            values = tuple(value.strip() for value in unchanged.split(",") if value.strip())
            yield ForeignKey(pattern, origin, values, here)
