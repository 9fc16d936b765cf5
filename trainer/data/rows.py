"""Rows of data files, the options that decide which samples they become, and counts of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config import RowKeys

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
UNITS = {".json": "element", ".parquet": "row"}
"""{suffix of a file whose rows are not lines: the unit that `Row.line` counts}."""
NUM_COLUMNS = 30


class UnusableError(Exception):
    """The reason why a row cannot be used for training, as `kind: detail`."""


@dataclass(frozen=True)
class Row:
    """One object of a data file. `line` counts lines from 1, or rows (parquet) or array elements
    (json).
    """

    file: Path
    line: int
    record: Any
    """Values by column name. If the row cannot be read, its raw content."""
    unread: tuple[str, ...] = ()
    """Names of the file's columns that are not in `record`."""
    problem: UnusableError | None = None
    """The reason why the row cannot be read, if any."""


@dataclass(frozen=True)
class PrepareOptions:
    """The values of `data.*` that decide which samples the rows of a file become."""

    keys: RowKeys
    max_length: int
    truncation: str = "error"
    on_bad_row: str = "error"
    max_samples: int = -1
    """Maximum number of rows read from all files together, including unusable ones; -1 = all."""
    special_in_content: str = "error"
    turns: str = "auto"
    train_on: str = "all"
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Summary:
    """Counts of rows: `num_rows` = kept rows + bad rows + dropped rows."""

    num_rows: int = 0
    num_samples: int = 0
    num_bad_rows: int = 0
    bad_rows_by_kind: Counter[str] = field(default_factory=Counter)
    num_dropped: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_cut_tokens: int = 0
    num_unknown: int = 0
    """Number of supervised tokens that stand for text without a token of its own, such as `<unk>`."""
    num_without_reasoning: int = 0
    """Number of supervised turns whose reasoning the template omits. This count and the next three
    include rows that are not trained.
    """
    num_conversations: int = 0
    num_apart: int = 0
    """Number of conversations in which each supervised turn became a sample."""
    num_unlike_prompt: int = 0
    """Number of supervised turns that do not begin with the header of the generation prompt."""
    rows_by_shape: Counter[str] = field(default_factory=Counter)
    """Number of rows by format, including bad rows whose format was recognised."""
    unread_keys: Counter[str] = field(default_factory=Counter)
    """Number of messages by message key that neither the template nor the trainer reads."""
    unread_columns: Counter[str] = field(default_factory=Counter)
    """Number of rows by column that their format does not read; only the first `NUM_COLUMNS`."""
    end_token_ids: set[int] = field(default_factory=set)
    """Tokens that end an assistant turn or a text; generation must stop at them."""
    fingerprint: str = ""

    @property
    def num_kept_rows(self) -> int:
        """Number of rows with at least one sample."""
        return self.num_rows - self.num_bad_rows - self.num_dropped

    def add(self, other: "Summary") -> None:
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, own | value if isinstance(value, set) else own + value)
        self.unread_columns = Counter(dict(islice(self.unread_columns.items(), NUM_COLUMNS)))

    def take(self) -> "Summary":
        """Return the counts, and reset them."""
        taken = replace(self)
        vars(self).update(vars(Summary()))
        return taken

    def as_json(self) -> Mapping[str, object]:
        return vars(self) | {"end_token_ids": sorted(self.end_token_ids)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Summary":
        counts = {name: Counter(value) for name, value in found.items() if isinstance(value, dict)}
        return cls(**found | counts | {"end_token_ids": set(found["end_token_ids"])})


def location(file: Path, line: int) -> str:
    """Return the place of a row: `a.jsonl:3`, `a.json: element 3`, `a.parquet: row 3`."""
    unit = UNITS.get(file.suffix)
    return f"{file}: {unit} {line}" if unit else f"{file}:{line}"
