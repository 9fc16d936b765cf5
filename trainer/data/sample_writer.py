"""Rows to the files of a prepared dataset, streamed: samples are appended, bad rows listed,
everything counted.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from trainer.config import RowKeys
from trainer.data.conversation import columns_of
from trainer.data.readers import iter_blocks, iter_rows
from trainer.data.row_encoder import SUPERVISED, BadRow, PreparedRows, PrepareOptions, RowEncoder
from trainer.data.row_processes import Located, prepare_blocks
from trainer.data.rows import Seen, location

TOKENS, ROWS = "tokens.bin", "rows.bin"
"""`TOKEN`s of all samples end to end, and a `ROW` of each."""
BAD_ROWS, OVER_LONG_ROWS = "bad_rows.jsonl", "over_long_rows.jsonl"
NUM_REASONS = 20  # told; the file has all
NUM_PLACES = 3
NUM_HOPELESS = 1000  # bad rows, and not a good one


@dataclass(frozen=True)
class Summary:
    """What happened to every row: `num_rows` = kept rows + bad rows + dropped ones."""

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
    turns: str
    """`data.turns`."""
    num_conversations: int
    """Rows that are one, unused ones included."""
    num_apart: int
    """Those of them of which each supervised turn became a sample."""
    num_unlike_prompt: int
    """Supervised turns that are not rendered as their generation prompt begins, those of unused
    rows included.
    """
    rows_by_shape: dict[str, int]
    """What rows were taken for, those included that turned out bad later."""
    unread_keys: dict[str, int]
    """Keys of messages that nothing reads, with the number of messages."""
    unread_columns: dict[str, int]
    """Columns that no shape of row has, with the number of rows."""
    end_token_ids: list[int]
    fingerprint: str

    @property
    def num_kept_rows(self) -> int:
        """Each has one sample or more."""
        return self.num_rows - self.num_bad_rows - self.num_dropped


def _open_rows(path: Path) -> TextIO:
    """For lines of JSON. Lone surrogates, as in the name of a file that is not UTF-8, become
    JSON's own escapes.
    """
    return path.open("w", encoding="utf-8", errors="backslashreplace")


class BadRows:
    """What was wrong with rows; each is written to `path`, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.by_kind: Counter[str] = Counter()
        self.is_cut = False
        """Whether there may be more rows, which were not read."""
        self._places: dict[str, list[str]] = {}
        self._by_reason: Counter[str] = Counter()
        self._file = _open_rows(path)

    def __enter__(self) -> "BadRows":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, row: BadRow) -> None:
        """Count and list a row; places are kept of the first reasons only, however many there
        are.
        """
        reason = row.reason
        self.by_kind[reason.split(":", 1)[0]] += 1
        if reason in self._places or len(self._places) < NUM_REASONS:
            self._by_reason[reason] += 1
            places = self._places.setdefault(reason, [])
            if len(places) < NUM_PLACES:
                places.append(location(row.file, row.line))
        self._file.write(
            json.dumps(row._asdict() | {"file": str(row.file)}, ensure_ascii=False) + "\n"
        )

    @property
    def total(self) -> int:
        return self.by_kind.total()

    def lines(self) -> list[str]:
        """The first reasons with their places, and the counts by kind."""
        lines = [self._line(reason, places) for reason, places in self._places.items()]
        if more := self.total - self._by_reason.total():
            lines.append(f"  … and {more} more")
        if self.is_cut:
            lines.append("  no row behind was read")
        return [
            *lines,
            "by reason: "
            + ", ".join(f"{kind} {count}" for kind, count in self.by_kind.most_common()),
        ]

    def _line(self, reason: str, places: list[str]) -> str:
        count = self._by_reason[reason]
        if count == 1:
            return f"  {places[0]}: {reason}"
        return (
            f"  {reason} ({count} rows: {', '.join(places)}{', …' if count > len(places) else ''})"
        )


class SamplesDigest:
    """Over ids, mask and bounds of samples in their order, as they were once stored:
    checkpoints name it.
    """

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]
        self._parts[2].update(np.int64(0).tobytes())

    def update(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """With further `TOKEN`s and ends of samples (int64), each in their order."""
        for part, array in zip(self._parts, (tokens & ~SUPERVISED, tokens < 0, ends), strict=True):
            part.update(np.ascontiguousarray(array).data)

    def hexdigest(self) -> str:
        return hashlib.sha256(
            "".join(part.hexdigest() for part in self._parts).encode()
        ).hexdigest()


class SampleWriter:
    """Fills a directory with tokens, rows and the lists of bad and of over-long rows; complete
    when left.
    """

    def __init__(self, directory: Path, options: PrepareOptions) -> None:
        self.options, self._seen = options, Seen()
        self._digest, self._end = SamplesDigest(), 0
        with ExitStack() as stack:
            self._tokens, self._rows = (
                stack.enter_context((directory / name).open("wb")) for name in (TOKENS, ROWS)
            )
            self.bad_rows = stack.enter_context(BadRows(directory / BAD_ROWS))
            self._over_long_rows = stack.enter_context(_open_rows(directory / OVER_LONG_ROWS))
            self._files = stack.pop_all()

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()

    def add(self, part: PreparedRows) -> None:
        """Append samples, and list the rows that have none or were cut."""
        part.samples["end"] += self._end
        self._end += len(part.tokens)
        self._tokens.write(part.tokens.data)
        self._rows.write(part.samples.data)
        self._digest.update(part.tokens, part.samples["end"])
        self._over_long_rows.writelines(
            json.dumps(entry, ensure_ascii=False) + "\n" for entry in part.over_long
        )
        for row in part.bad:
            self.bad_rows.add(row)
        self._seen.add(part.seen)

    @property
    def is_hopeless(self) -> bool:
        """Whether many rows were read, and all are bad."""
        return self.bad_rows.total == self._seen.counts["num_rows"] >= NUM_HOPELESS

    def summary(self) -> Summary:
        seen = self._seen
        counts = seen.counts + Counter(num_bad_rows=self.bad_rows.total)
        counted = {
            field.name: counts[field.name]
            for field in dataclasses.fields(Summary)
            if field.type is int
        }
        return Summary(
            **counted,
            turns=self.options.turns,
            bad_rows_by_kind=dict(self.bad_rows.by_kind.most_common()),
            rows_by_shape=dict(seen.rows_by_shape),
            unread_keys=dict(seen.unread_keys.most_common()),
            unread_columns=dict(seen.unread_columns.most_common()),
            end_token_ids=sorted(seen.end_token_ids),
            fingerprint=self._digest.hexdigest(),
        )


def write_samples(
    writer: SampleWriter,
    encoder: RowEncoder,
    files: list[Path],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Every row of `files`, in order, into `writer`, a bounded number at a time; `progress` as they
    are rendered.

    Where one bad row is enough, none is read behind a first one that is bad.
    """
    options = writer.options
    keys, limit, is_strict = options.keys, options.max_samples, options.on_bad_row == "error"
    if is_strict and _add_bad_first_row(writer, encoder, files if limit < 0 else files[:1]):
        return
    with closing(prepare_blocks(encoder, _located_blocks(files, keys, limit), progress)) as parts:
        for part in parts:
            writer.add(part)
            progress()
            if is_strict and writer.is_hopeless:
                writer.bad_rows.is_cut = True
                break


def _add_bad_first_row(writer: SampleWriter, encoder: RowEncoder, files: list[Path]) -> bool:
    """Whether there is a file whose first row is none; a .json file, whose rows are read at
    once, is not looked at.
    """
    keys = writer.options.keys
    for file_index, path in enumerate(files):
        row = next(iter_rows(path, columns_of(keys)), None) if path.suffix != ".json" else None
        if row is not None and (part := encoder.bad_row(file_index, row)) is not None:
            writer.add(part)
            writer.bad_rows.is_cut = True
            return True
    return False


def _located_blocks(files: list[Path], keys: RowKeys, limit: int) -> Iterator[Located]:
    """The first `limit` rows of all files together, all if it is negative."""
    for file_index, path in enumerate(files):
        for block in iter_blocks(path, columns_of(keys)) if limit else ():
            head = block.head(limit) if limit >= 0 else block
            yield file_index, head
            limit -= len(head) if limit >= 0 else 0
            if not limit:
                break
