"""Rows to the files of a prepared dataset, streamed: samples are appended, bad rows listed, everything counted."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.chat import ChatEncoder, Encoded
from trainer.data.conversation import Conversation, RowKeys, to_conversation
from trainer.data.rows import BadRow, Row, excerpt, iter_rows

CHUNK_ROWS = 2000
BAD_ROWS, OVER_LONG_ROWS = "bad_rows.jsonl", "over_long_rows.jsonl"
NUM_LISTED = 20
ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {
    "input_ids": ("<i4", ()),
    "loss_mask": ("|b1", ()),
    "offsets": ("<i8", ()),
    "source": ("<i8", (2,)),  # file index, line
    "num_loss_tokens": ("<i4", ()),
}
"""The .npy files of a dataset: element type and shape of one entry."""


@dataclass(frozen=True)
class PrepareOptions:
    """The part of `data.*` that decides which samples come out of a file."""

    keys: RowKeys
    max_length: int
    truncation: str = "error"
    on_bad_row: str = "error"
    max_bad_fraction: float = 0.01
    max_samples: int = -1
    """Only the first so many rows of all files together, unusable ones included; -1 = all."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What happened to every row: `num_rows` = samples + bad rows + dropped ones."""

    num_rows: int
    num_samples: int
    num_bad_rows: int
    bad_rows_by_kind: dict[str, int]
    num_dropped: int
    num_truncated: int
    num_tokens: int
    num_loss_tokens: int
    num_cut_tokens: int
    end_token_ids: list[int]
    fingerprint: str


class SampleWriter:
    """Fills a directory with the arrays of `ARRAYS` and the lists of bad and of over-long rows; complete when left."""

    def __init__(self, directory: Path, options: PrepareOptions) -> None:
        self.options = options
        self.first_bad_rows: list[BadRow] = []
        self._counts: Counter[str] = Counter()
        self._bad_rows_by_kind: Counter[str] = Counter()
        self._stack = ExitStack()
        self._arrays = {name: self._stack.enter_context(_ArrayFile(directory / f"{name}.npy", name)) for name in ARRAYS}
        self._bad_rows = self._stack.enter_context((directory / BAD_ROWS).open("w", encoding="utf-8"))
        self._over_long_rows = self._stack.enter_context((directory / OVER_LONG_ROWS).open("w", encoding="utf-8"))
        self._arrays["offsets"].append([0])

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def reject(self, row: BadRow) -> None:
        """Count and list a row that cannot be trained on."""
        self._counts["num_rows"] += 1
        self._counts["num_bad_rows"] += 1
        self._bad_rows_by_kind[row.kind] += 1
        if len(self.first_bad_rows) < NUM_LISTED:
            self.first_bad_rows.append(row)
        self._bad_rows.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False, default=str) + "\n")

    def add(self, row: Row, file_index: int, encoded: Encoded | str) -> None:
        """Append a sample, cut to the longest length, or drop its row, or reject it (a text is the reason)."""
        if isinstance(encoded, str):
            return self._reject(row, encoded)
        max_length, truncation = self.options.max_length, self.options.truncation
        num_cut = max(0, len(encoded.input_ids) - max_length)
        if num_cut and truncation == "error":
            num_tokens = len(encoded.input_ids)
            return self._reject(row, f"over-long: {num_tokens} tokens > data.max_length {max_length}")
        if num_cut and truncation == "drop":
            self._counts.update(num_rows=1, num_dropped=1)
            return self._list_over_long(row, encoded, "dropped")
        kept = slice(num_cut, None) if truncation == "left" else slice(None, max_length)
        input_ids, loss_mask = encoded.input_ids[kept], encoded.loss_mask[kept]
        num_loss_tokens = int(np.count_nonzero(loss_mask[1:]))
        if num_loss_tokens == 0:
            when = f" after data.truncation={truncation} to data.max_length {max_length}" if num_cut else ""
            return self._reject(row, f"nothing supervised: none of {len(input_ids)} tokens carries a label{when}")
        if num_cut:
            self._list_over_long(row, encoded, "cut")
        self._counts.update(num_rows=1, num_samples=1, num_truncated=int(num_cut > 0), num_cut_tokens=num_cut)
        self._counts.update(num_tokens=len(input_ids), num_loss_tokens=num_loss_tokens)
        self._arrays["input_ids"].append(input_ids)
        self._arrays["loss_mask"].append(loss_mask)
        self._arrays["offsets"].append([self._counts["num_tokens"]])
        self._arrays["source"].append([(file_index, row.line)])
        self._arrays["num_loss_tokens"].append([num_loss_tokens])
        return None

    def _list_over_long(self, row: Row, encoded: Encoded, action: str) -> None:
        entry = {"file": str(row.file), "line": row.line, "num_tokens": len(encoded.input_ids), "action": action}
        self._over_long_rows.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _reject(self, row: Row, reason: str) -> None:
        self.reject(BadRow(row.file, row.line, reason, excerpt(row.record)))

    def summary(self, end_token_ids: list[int]) -> Summary:
        digests = [self._arrays[name].sha256.hexdigest() for name in ("input_ids", "loss_mask", "offsets")]
        counted = {field.name: self._counts[field.name] for field in dataclasses.fields(Summary) if field.type is int}
        return Summary(
            **counted,
            bad_rows_by_kind=dict(self._bad_rows_by_kind.most_common()),
            end_token_ids=end_token_ids,
            fingerprint=hashlib.sha256("".join(digests).encode()).hexdigest(),
        )


class _ArrayFile:
    """A .npy file of unknown length: entries are appended, the header is completed at the end."""

    def __init__(self, path: Path, name: str) -> None:
        self._dtype, self._entry_shape = ARRAYS[name]
        self._num_entries = 0
        self._file = path.open("wb")
        self._write_header()
        self.sha256 = hashlib.sha256()

    def append(self, entries: Any) -> None:
        array = np.ascontiguousarray(entries, dtype=self._dtype)
        self._num_entries += len(array)
        self._file.write(array.data)
        self.sha256.update(array.data)

    def _write_header(self) -> None:
        # numpy pads the header so that the first dimension can grow in place.
        shape = (self._num_entries, *self._entry_shape)
        header = {"descr": self._dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> "_ArrayFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


def write_samples(writer: SampleWriter, encoder: ChatEncoder, files: list[Path]) -> None:
    """Every row of `files`, in order, into `writer`, a bounded number of rows at a time."""
    rows = _located_rows(files)
    if writer.options.max_samples >= 0:
        rows = itertools.islice(rows, writer.options.max_samples)
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        parsed = [row if isinstance(row, BadRow) else to_conversation(row, writer.options.keys) for _, row in chunk]
        encoded = iter(encoder.encode([item for item in parsed if isinstance(item, Conversation)]))
        for (file_index, row), item in zip(chunk, parsed, strict=True):
            if isinstance(row, BadRow):
                writer.reject(row)
            elif isinstance(item, BadRow):
                writer.reject(item)
            else:
                writer.add(row, file_index, next(encoded))


def _located_rows(files: list[Path]) -> Iterator[tuple[int, Row | BadRow]]:
    for file_index, path in enumerate(files):
        for row in iter_rows(path):
            yield file_index, row
