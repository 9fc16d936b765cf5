"""Rows of data files, good and bad."""

import copy
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
UNITS = {".json": "element", ".parquet": "row"}
"""What `line` counts in files without lines, or whose lines are not known."""
EXCERPT_CHARS = 200
NUM_COLUMNS = 30
TOO_DEEP = "nested too deeply: lists or objects in the row stand inside of hundreds of others"


class UnusableError(Exception):
    """Why a row cannot be trained on, as `kind: detail`; on its way from row to sample it
    stands for the row.
    """


@dataclass(frozen=True)
class Row:
    """One object of a data file; `line` counts from 1 (the row in parquet, the element in a
    json array).
    """

    file: Path
    line: int
    record: Any
    """Columns by name; of a row that cannot be read what stands there instead."""
    unread: tuple[str, ...] = ()
    """Names of columns that the file has besides those in `record`."""
    problem: UnusableError | None = None
    """Why it cannot be read."""


@dataclass
class Seen:
    """What was met in rows on their way to samples."""

    counts: Counter[str] = field(default_factory=Counter)
    """`num_*` of `Summary`."""
    rows_by_shape: Counter[str] = field(default_factory=Counter)
    """By what rows were taken for."""
    unread_keys: Counter[str] = field(default_factory=Counter)
    """Keys of messages that neither the template nor this package reads, with the number of
    messages.
    """
    unread_columns: Counter[str] = field(default_factory=Counter)
    """Columns that no shape of row has, the first `NUM_COLUMNS` that are met, with the number
    of rows.
    """
    end_token_ids: set[int] = field(default_factory=set)
    """That close an assistant turn or a text: what generation must stop at."""

    def add(self, other: "Seen") -> None:
        self.counts.update(other.counts)
        self.rows_by_shape.update(other.rows_by_shape)
        self.unread_keys.update(other.unread_keys)
        self.end_token_ids.update(other.end_token_ids)
        self.add_columns(other.unread_columns)

    def add_columns(self, unread: Mapping[str, int]) -> None:
        for name, count in unread.items():
            if name in self.unread_columns or len(self.unread_columns) < NUM_COLUMNS:
                self.unread_columns[name] += count

    def take(self) -> "Seen":
        """All that was met since this was called last."""
        found = copy.deepcopy(self)
        for part in vars(self).values():
            part.clear()
        return found


def location(file: Path, line: int) -> str:
    """Where a row is found: `a.jsonl:3`, `a.json: element 3`, `a.parquet: row 3`."""
    unit = UNITS.get(file.suffix)
    return f"{file}: {unit} {line}" if unit else f"{file}:{line}"


_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = 10
_SHORT.maxstring = _SHORT.maxother = 100


def excerpt(value: Any) -> str:
    """Return the beginning of a row, for messages."""
    return _SHORT.repr(value)[:EXCERPT_CHARS]
