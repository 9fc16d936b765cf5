"""Rows to the files of a prepared dataset, streamed: samples are appended, bad rows listed, everything counted."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.bad_rows import BadRows
from trainer.data.chat import ChatEncoder, Encoded
from trainer.data.conversation import RowKeys, to_conversation
from trainer.data.readers import iter_rows
from trainer.data.rows import Row, UnusableError

SAMPLES_PER_WRITE = 256  # to write and hash a sample alone costs more than to make it
BAD_ROWS, OVER_LONG_ROWS = "bad_rows.jsonl", "over_long_rows.jsonl"
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
    special_in_content: str = "error"
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
    num_without_reasoning: int
    """Supervised turns whose reasoning the template leaves out, those of unused rows included."""
    unread_keys: dict[str, int]
    """Keys of messages that nothing reads, with the number of messages."""
    end_token_ids: list[int]
    fingerprint: str


class SampleWriter:
    """Fills a directory with the arrays of `ARRAYS` and the lists of bad and of over-long rows; complete when left."""

    def __init__(self, directory: Path, options: PrepareOptions) -> None:
        self.options = options
        self._counts: Counter[str] = Counter()
        self._pending: list[tuple[np.ndarray, np.ndarray, int, tuple[int, int], int]] = []
        self._stack = ExitStack()
        self._arrays = {name: self._stack.enter_context(_ArrayFile(directory / f"{name}.npy", name)) for name in ARRAYS}
        self.bad_rows = self._stack.enter_context(BadRows(directory / BAD_ROWS))
        self._over_long_rows = self._stack.enter_context((directory / OVER_LONG_ROWS).open("w", encoding="utf-8"))
        self._arrays["offsets"].append([0])

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._stack:
            self._write_pending()

    def add(self, row: Row, file_index: int, encoded: Encoded | UnusableError) -> None:
        """Append a sample, cut to the longest length, or drop its row, or count and list it among the bad ones."""
        if isinstance(encoded, UnusableError):
            return self._reject(row, str(encoded))
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
        counts = self._counts
        counts["num_rows"] += 1
        counts["num_samples"] += 1
        counts["num_truncated"] += num_cut > 0
        counts["num_cut_tokens"] += num_cut
        counts["num_tokens"] += len(input_ids)
        counts["num_loss_tokens"] += num_loss_tokens
        self._pending.append((input_ids, loss_mask, counts["num_tokens"], (file_index, row.line), num_loss_tokens))
        if len(self._pending) == SAMPLES_PER_WRITE:
            self._write_pending()
        return None

    def _write_pending(self) -> None:
        if not self._pending:
            return
        input_ids, loss_masks, offsets, sources, num_loss_tokens = zip(*self._pending, strict=True)
        self._pending.clear()
        self._arrays["input_ids"].append(np.concatenate(input_ids))
        self._arrays["loss_mask"].append(np.concatenate(loss_masks))
        self._arrays["offsets"].append(offsets)
        self._arrays["source"].append(sources)
        self._arrays["num_loss_tokens"].append(num_loss_tokens)

    def _list_over_long(self, row: Row, encoded: Encoded, action: str) -> None:
        entry = {"file": str(row.file), "line": row.line, "num_tokens": len(encoded.input_ids), "action": action}
        self._over_long_rows.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _reject(self, row: Row, reason: str) -> None:
        self._counts["num_rows"] += 1
        self.bad_rows.add(row, reason)

    def summary(self, encoder: ChatEncoder) -> Summary:
        digests = [self._arrays[name].sha256.hexdigest() for name in ("input_ids", "loss_mask", "offsets")]
        counted = {field.name: self._counts[field.name] for field in dataclasses.fields(Summary) if field.type is int}
        counted |= {"num_bad_rows": self.bad_rows.total, "num_without_reasoning": encoder.num_without_reasoning}
        return Summary(
            **counted,
            bad_rows_by_kind=dict(self.bad_rows.by_kind.most_common()),
            unread_keys=dict(encoder.unread_keys.most_common()),
            end_token_ids=encoder.end_token_ids,
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


def write_samples(
    writer: SampleWriter, encoder: ChatEncoder, files: list[Path], progress: Callable[[], None] = lambda: None
) -> None:
    """Every row of `files`, in order, into `writer`, a bounded number of rows at a time; `progress` after each."""
    keys, limit = writer.options.keys, writer.options.max_samples
    rows, ahead = itertools.tee(itertools.islice(_located_rows(files, keys), limit if limit >= 0 else None))
    parsed = (to_conversation(row, keys) for _, row in ahead)
    for (file_index, row), result in zip(rows, encoder.encode(parsed), strict=True):
        writer.add(row, file_index, result)
        progress()


def _located_rows(files: list[Path], keys: RowKeys) -> Iterator[tuple[int, Row]]:
    for file_index, path in enumerate(files):
        for row in iter_rows(path, keys.columns):
            yield file_index, row
