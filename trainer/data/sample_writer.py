"""Rows to the files of a prepared dataset, streamed: samples are appended, bad rows listed, everything counted."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import RowKeys
from trainer.data.conversation import columns_of
from trainer.data.readers import iter_rows
from trainer.data.row_encoder import PrepareOptions, RowEncoder
from trainer.data.rows import Row, Seen, UnusableError, excerpt, location
from trainer.data.tokens import Encoded

SAMPLES_PER_WRITE = 256  # to write and hash a sample alone costs more than to make it
TOKENS, ROWS = "tokens.bin", "rows.bin"
BAD_ROWS, OVER_LONG_ROWS = "bad_rows.jsonl", "over_long_rows.jsonl"
TOKEN = np.dtype("<i4")
"""Ids of all samples end to end; those that are supervised have the sign bit too."""
SUPERVISED = np.int32(-(2**31))
ROW = np.dtype([("file", "<i4"), ("line", "<i8"), ("num_tokens", "<i4"), ("num_loss_tokens", "<i4"), ("end", "<i8")])
"""Of a sample: index of its file and its line there, tokens, how many of them are labels, where it ends in `TOKENS`."""
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
    """Supervised turns that are not rendered as their generation prompt begins, those of unused rows included."""
    rows_by_shape: dict[str, int]
    """What rows were taken for, those included that turned out bad later."""
    unread_keys: dict[str, int]
    """Keys of messages that nothing reads, with the number of messages."""
    end_token_ids: list[int]
    fingerprint: str

    @property
    def num_kept_rows(self) -> int:
        """Each has one sample or more."""
        return self.num_rows - self.num_bad_rows - self.num_dropped


class BadRows:
    """What was wrong with rows; each is written to `path`, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.by_kind: Counter[str] = Counter()
        self.is_cut = False
        """Whether there may be more rows, which were not read."""
        self._places: dict[str, list[str]] = {}
        self._by_reason: Counter[str] = Counter()
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> "BadRows":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Count and list a row; places are kept of the first reasons only, however many there are."""
        self.by_kind[reason.split(":", 1)[0]] += 1
        if reason in self._places or len(self._places) < NUM_REASONS:
            self._by_reason[reason] += 1
            places = self._places.setdefault(reason, [])
            if len(places) < NUM_PLACES:
                places.append(location(row.file, row.line))
        entry = {"file": str(row.file), "line": row.line, "reason": reason, "excerpt": excerpt(row.record)}
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")

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
        return [*lines, "by reason: " + ", ".join(f"{kind} {count}" for kind, count in self.by_kind.most_common())]

    def _line(self, reason: str, places: list[str]) -> str:
        count = self._by_reason[reason]
        if count == 1:
            return f"  {places[0]}: {reason}"
        return f"  {reason} ({count} rows: {', '.join(places)}{', …' if count > len(places) else ''})"


class SamplesDigest:
    """Over ids, mask and bounds of samples in their order, as they were once stored: checkpoints name it."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]
        self._parts[2].update(np.int64(0).tobytes())

    def update(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """With further `TOKEN`s and ends of samples (int64), each in their order."""
        for part, array in zip(self._parts, (tokens & ~SUPERVISED, tokens < 0, ends), strict=True):
            part.update(np.ascontiguousarray(array).data)

    def hexdigest(self) -> str:
        return hashlib.sha256("".join(part.hexdigest() for part in self._parts).encode()).hexdigest()


class SampleWriter:
    """Fills a directory with tokens, rows and the lists of bad and of over-long rows; complete when left."""

    def __init__(self, directory: Path, options: PrepareOptions) -> None:
        self.options = options
        self._counts: Counter[str] = Counter()
        self._pending: list[tuple[Encoded, tuple[int, int, int, int, int]]] = []
        self._digest, self._end = SamplesDigest(), 0
        with ExitStack() as stack:
            self._tokens, self._rows = (stack.enter_context((directory / name).open("wb")) for name in (TOKENS, ROWS))
            self.bad_rows = stack.enter_context(BadRows(directory / BAD_ROWS))
            self._over_long_rows = stack.enter_context((directory / OVER_LONG_ROWS).open("w", encoding="utf-8"))
            self._files = stack.pop_all()

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._files:
            self._write_pending()

    def add(self, row: Row, file_index: int, encoded: list[Encoded] | UnusableError) -> None:
        """Append the samples of a row, cut to the longest length, or drop it, or list it among the bad ones."""
        if isinstance(encoded, UnusableError):
            return self._reject(row, str(encoded))
        max_length, truncation = self.options.max_length, self.options.truncation
        num_cut, num_tokens = 0, max(len(sample.input_ids) for sample in encoded)
        if num_tokens > max_length and truncation == "split" and self.options.keys.text_key is not None:
            encoded, num_tokens = _pieces(encoded[0], max_length), max_length
        elif num_tokens > max_length and truncation in ("error", "split"):
            hint = "; data.truncation=split is for text_key alone" if truncation == "split" else ""
            return self._reject(row, f"over-long: {num_tokens} tokens > data.max_length {max_length}{hint}")
        if num_tokens > max_length and truncation == "drop":
            self._counts.update(num_rows=1, num_dropped=1)
            return self._list_over_long(row, num_tokens, "dropped")
        kept, end = [], self._end
        for sample in encoded:
            part = slice(-max_length, None) if truncation == "left" else slice(None, max_length)
            input_ids, loss_mask = sample.input_ids[part], sample.loss_mask[part]
            if num_loss_tokens := int(np.count_nonzero(loss_mask[1:])):
                place = (file_index, row.line, len(input_ids), num_loss_tokens, end := end + len(input_ids))
                kept.append((Encoded(input_ids, loss_mask), place))
            num_cut += len(sample.input_ids) - len(input_ids)
        if not kept:
            when = f" after data.truncation={truncation} to data.max_length {max_length}" if num_cut else ""
            num_tokens = min(num_tokens, max_length)
            return self._reject(row, f"nothing supervised: none of {num_tokens} tokens carries a label{when}")
        if num_cut:
            self._list_over_long(row, num_tokens, "cut")
        counts = self._counts
        counts["num_rows"] += 1
        counts["num_samples"] += len(kept)
        counts["num_truncated"] += num_cut > 0
        counts["num_cut_tokens"] += num_cut
        counts["num_tokens"] += end - self._end
        counts["num_loss_tokens"] += sum(num_labels for _, (_, _, _, num_labels, _) in kept)
        self._end = end
        self._pending += kept
        if len(self._pending) >= SAMPLES_PER_WRITE:
            self._write_pending()
        return None

    def _write_pending(self) -> None:
        if not self._pending:
            return
        ids = np.concatenate([sample.input_ids for sample, _ in self._pending], dtype=TOKEN)
        mask = np.concatenate([sample.loss_mask for sample, _ in self._pending])
        rows = np.array([row for _, row in self._pending], dtype=ROW)
        self._pending.clear()
        tokens = np.where(mask, ids | SUPERVISED, ids)
        self._tokens.write(tokens.data)
        self._rows.write(rows.data)
        self._digest.update(tokens, rows["end"])

    def _list_over_long(self, row: Row, num_tokens: int, action: str) -> None:
        entry = {"file": str(row.file), "line": row.line, "num_tokens": num_tokens, "action": action}
        self._over_long_rows.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _reject(self, row: Row, reason: str) -> None:
        self._counts["num_rows"] += 1
        self.bad_rows.add(row, reason)

    def summary(self, seen: Seen) -> Summary:
        counts = self._counts + seen.counts
        counts["num_bad_rows"] = self.bad_rows.total
        counted = {field.name: counts[field.name] for field in dataclasses.fields(Summary) if field.type is int}
        return Summary(
            **counted,
            turns=self.options.turns,
            bad_rows_by_kind=dict(self.bad_rows.by_kind.most_common()),
            rows_by_shape=dict(seen.rows_by_shape),
            unread_keys=dict(seen.unread_keys.most_common()),
            end_token_ids=sorted(seen.end_token_ids),
            fingerprint=self._digest.hexdigest(),
        )


def _pieces(sample: Encoded, max_length: int) -> list[Encoded]:
    """A text as samples one after the other; each begins with the last token of the one before, which predicts the
    next, so that no label is lost and none comes twice.
    """
    starts = range(0, len(sample.input_ids) - 1, max(1, max_length - 1))
    parts = [slice(start, start + max_length) for start in starts]
    return [Encoded(sample.input_ids[part], sample.loss_mask[part]) for part in parts]


def write_samples(
    writer: SampleWriter, encoder: RowEncoder, files: list[Path], progress: Callable[[], None] = lambda: None
) -> None:
    """Every row of `files`, in order, into `writer`, a bounded number of rows at a time; `progress` after each.

    Where one bad row is enough, none is read behind a first one that is bad.
    """
    options = writer.options
    keys, limit, is_strict = options.keys, options.max_samples, options.on_bad_row == "error"
    if is_strict and _add_bad_first_row(writer, encoder, files if limit < 0 else files[:1]):
        return
    rows, ahead = itertools.tee(itertools.islice(_located_rows(files, keys), limit if limit >= 0 else None))
    with closing(encoder.encode(row for _, row in ahead)) as encoded:
        for num_rows, ((file_index, row), result) in enumerate(zip(rows, encoded, strict=True), start=1):
            writer.add(row, file_index, result)
            progress()
            if is_strict and writer.bad_rows.total == num_rows == NUM_HOPELESS:
                writer.bad_rows.is_cut = True
                break


def _add_bad_first_row(writer: SampleWriter, encoder: RowEncoder, files: list[Path]) -> bool:
    """Whether there is a file whose first row is none; a .json file, whose rows are read at once, is not looked at."""
    keys = writer.options.keys
    for file_index, path in enumerate(files):
        row = next(iter_rows(path, columns_of(keys)), None) if path.suffix != ".json" else None
        if row is not None and isinstance(problem := encoder.check(row), UnusableError):
            writer.add(row, file_index, problem)
            writer.bad_rows.is_cut = True
            return True
    return False


def _located_rows(files: list[Path], keys: RowKeys) -> Iterator[tuple[int, Row]]:
    for file_index, path in enumerate(files):
        for row in iter_rows(path, columns_of(keys)):
            yield file_index, row
