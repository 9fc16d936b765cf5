"""Rows to samples: encoded, cut to the longest length, or told apart as bad."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.chat import ChatEncoder
from trainer.data.readers import RowBlock
from trainer.data.rows import Row, Seen, UnusableError, excerpt
from trainer.data.shapes import RowParser
from trainer.data.tokens import Encoded

TOKEN = np.dtype("<i4")
"""Ids of samples end to end; those that are supervised have the sign bit too."""
SUPERVISED = np.int32(-(2**31))
ROW = np.dtype(
    [
        ("file", "<i4"),
        ("line", "<i8"),
        ("num_tokens", "<i4"),
        ("num_loss_tokens", "<i4"),
        ("end", "<i8"),
    ]
)
"""Of a sample: index of its file and its line there, tokens, how many of them are labels (the first
never is: nothing predicts it), where it ends."""

Result = list[Encoded] | UnusableError


@dataclass(frozen=True)
class PrepareOptions:
    """The part of `data.*` that decides which samples come out of a file."""

    keys: RowKeys
    max_length: int
    truncation: str = "error"
    on_bad_row: str = "error"
    max_samples: int = -1
    """Only the first so many rows of all files together, unusable ones included; -1 = all."""
    special_in_content: str = "error"
    turns: str = "auto"
    train_on: str = "all"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """That the tokenizer got since rows of tokens may have been made, with their ids."""


class BadRow(NamedTuple):
    """A row that cannot be trained on."""

    file: Path
    line: int
    reason: str
    excerpt: str


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """What became of rows that stand together: each is a sample or more, or bad, or dropped."""

    tokens: np.ndarray
    """As `TOKEN`."""
    samples: np.ndarray
    """As `ROW`; `end` counts from the first of these tokens."""
    bad: list[BadRow]
    over_long: list[dict[str, object]]
    """What is listed of rows that were cut or dropped."""
    seen: Seen


class _Judge:
    """Takes encoded rows one by one, and decides what becomes of each."""

    def __init__(self, options: PrepareOptions, file_index: int, seen: Seen) -> None:
        self._options, self._file_index, self._seen = options, file_index, seen
        self._kept: list[Encoded] = []
        self._places: list[tuple[int, int, int, int, int]] = []
        self._bad: list[BadRow] = []
        self._over_long: list[dict[str, object]] = []
        self._end = 0

    def add(self, row: Row, encoded: Result) -> None:
        """Keep the samples of a row, cut to the longest length, or drop it, or list it among
        the bad ones.
        """
        counts = self._seen.counts
        counts["num_rows"] += 1
        if isinstance(encoded, UnusableError):
            return self._reject(row, str(encoded))
        max_length, truncation = self._options.max_length, self._options.truncation
        num_cut, num_tokens = 0, max(len(sample.input_ids) for sample in encoded)
        if (
            num_tokens > max_length
            and truncation == "split"
            and self._options.keys.text_key is not None
        ):
            encoded, num_tokens = _pieces(encoded[0], max_length), max_length
        elif num_tokens > max_length and truncation in ("error", "split"):
            hint = "; data.truncation=split is for text_key alone" if truncation == "split" else ""
            return self._reject(
                row, f"over-long: {num_tokens} tokens > data.max_length {max_length}{hint}"
            )
        if num_tokens > max_length and truncation == "drop":
            counts["num_dropped"] += 1
            return self._list_over_long(row, num_tokens, "dropped")
        part, num_kept = (
            slice(-max_length, None) if truncation == "left" else slice(None, max_length),
            len(self._kept),
        )
        for sample in encoded:
            is_long = len(sample.input_ids) > max_length
            kept = Encoded(sample.input_ids[part], sample.loss_mask[part]) if is_long else sample
            if num_loss_tokens := int(np.count_nonzero(kept.loss_mask[1:])):
                self._end += len(kept.input_ids)
                self._places.append(
                    (self._file_index, row.line, len(kept.input_ids), num_loss_tokens, self._end)
                )
                self._kept.append(kept)
            num_cut += len(sample.input_ids) - len(kept.input_ids)
        if len(self._kept) == num_kept:
            when = (
                f" after data.truncation={truncation} to data.max_length {max_length}"
                if num_cut
                else ""
            )
            num_tokens = min(num_tokens, max_length)
            return self._reject(
                row, f"nothing supervised: none of {num_tokens} tokens carries a label{when}"
            )
        if num_cut:
            counts.update(num_truncated=1, num_cut_tokens=num_cut)
            self._list_over_long(row, num_tokens, "cut")
        return None

    def _list_over_long(self, row: Row, num_tokens: int, action: str) -> None:
        entry = {
            "file": str(row.file),
            "line": row.line,
            "num_tokens": num_tokens,
            "action": action,
        }
        self._over_long.append(entry)

    def _reject(self, row: Row, reason: str) -> None:
        self._bad.append(BadRow(row.file, row.line, reason, excerpt(row.record)))

    def prepared(self) -> PreparedRows:
        tokens, samples = np.zeros(0, dtype=TOKEN), np.array(self._places, dtype=ROW)
        if self._kept:
            ids = np.concatenate([sample.input_ids for sample in self._kept], dtype=TOKEN)
            tokens = np.where(
                np.concatenate([sample.loss_mask for sample in self._kept]), ids | SUPERVISED, ids
            )
        num_labels = int(samples["num_loss_tokens"].sum())
        self._seen.counts.update(
            num_samples=len(samples), num_tokens=len(tokens), num_loss_tokens=num_labels
        )
        return PreparedRows(tokens, samples, self._bad, self._over_long, self._seen.take())


def _pieces(sample: Encoded, max_length: int) -> list[Encoded]:
    """A text as samples one after the other; each begins with the last token of the one before,
    which predicts the next, so that no label is lost and none comes twice.
    """
    starts = range(0, len(sample.input_ids) - 1, max(1, max_length - 1))
    parts = [slice(start, start + max_length) for start in starts]
    return [Encoded(sample.input_ids[part], sample.loss_mask[part]) for part in parts]


def _told(rows: Iterable[Row], progress: Callable[[], None]) -> Iterator[Row]:
    for row in rows:
        progress()
        yield row


class RowEncoder:
    """What `options` make of rows with a tokenizer. Raises `DataError` as `ChatEncoder` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> None:
        self.options, self._seen = options, Seen()
        self._chats = ChatEncoder(
            tokenizer,
            template_kwargs=options.template_kwargs,
            special_in_content=options.special_in_content,
            turns=options.turns,
            train_on=options.train_on,
            seen=self._seen,
        )
        self._keys = options.keys, tokenizer, options.new_tokens
        self._parser = RowParser(*self._keys, self._seen)

    def encode(self, rows: Iterable[Row]) -> Iterator[Result]:
        """In order: the samples of each row, or the reason why it has none."""
        return self._chats.encode(map(self._parser.parse, rows))

    def prepare(
        self, file_index: int, block: RowBlock, progress: Callable[[], None]
    ) -> PreparedRows:
        """`progress` is called with every row."""
        rows = list(block.rows())
        return self._judged(file_index, rows, self.encode(_told(rows, progress)))

    def bad_row(self, file_index: int, row: Row) -> PreparedRows | None:
        """What becomes of a row that is none, as far as can be told without rendering it."""
        item = RowParser(*self._keys).parse(row)
        return self._judged(file_index, [row], [item]) if isinstance(item, UnusableError) else None

    def _judged(
        self, file_index: int, rows: Iterable[Row], results: Iterable[Result]
    ) -> PreparedRows:
        judge = _Judge(self.options, file_index, self._seen)
        for row, result in zip(rows, results, strict=True):
            judge.add(row, result)
        return judge.prepared()
