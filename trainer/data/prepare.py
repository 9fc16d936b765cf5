"""Files to prepared samples: rows are encoded, cut to length and counted, a few in this process,
many in one process for each CPU, and appended to the files of a directory.
"""

import dataclasses
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.chat import ChatEncoder
from trainer.data.formats import RowParser, columns_of
from trainer.data.readers import RowBlock, iter_blocks
from trainer.data.rows import Row, Seen, UnusableError, excerpt, location
from trainer.data.tokens import Encoded
from trainer.errors import EXIT_CRASH
from trainer.runtime.signals import become_worker

TOKENS, ROWS = "tokens.bin", "rows.bin"
"""Files with the `TOKEN`s of all samples end to end, and with a `ROW` of each."""
BAD_ROWS, OVER_LONG_ROWS = "bad_rows.jsonl", "over_long_rows.jsonl"
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
ROWS_HERE = 500  # starting processes takes longer than preparing so few rows
NUM_BLOCKS_AHEAD = 2  # for each process
NUM_REASONS, NUM_PLACES = 20, 3  # listed in an error; the file has all

Result = list[Encoded] | UnusableError
Located = tuple[int, RowBlock]
"""Index of a file, and rows of it."""


@dataclass(frozen=True)
class PrepareOptions:
    """The part of `data.*` that decides which samples come out of a file."""

    keys: RowKeys
    max_length: int
    truncation: str = "error"
    on_bad_row: str = "error"
    max_samples: int = -1
    """Rows that are read of all files together, unusable ones included; -1 = all."""
    special_in_content: str = "error"
    turns: str = "auto"
    train_on: str = "all"
    template_kwargs: dict[str, Any] = field(default_factory=dict)


class BadRow(NamedTuple):
    """A row that cannot be trained on."""

    file: Path
    line: int
    reason: str
    excerpt: str


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """The samples of a block of rows, and the rows that have none or were cut."""

    tokens: np.ndarray
    """As `TOKEN`."""
    samples: np.ndarray
    """As `ROW`; `end` counts from the first of these tokens."""
    bad: list[BadRow]
    over_long: list[dict[str, object]]
    seen: Seen


class RowEncoder:
    """Turns rows into samples. Raises `DataError` as `ChatEncoder` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> None:
        self._options, self._seen = options, Seen()
        self._chats = ChatEncoder(
            tokenizer,
            template_kwargs=options.template_kwargs,
            special_in_content=options.special_in_content,
            turns=options.turns,
            train_on=options.train_on,
            seen=self._seen,
        )
        self._parser = RowParser(options.keys, tokenizer, self._seen)

    def encode(self, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield in order the samples of each row, or the reason why it has none."""
        return self._chats.encode(map(self._parser.parse, rows))

    def prepare(self, file_index: int, block: RowBlock) -> PreparedRows:
        """Encode a block, and cut, drop or list as bad the rows that do not fit."""
        bad: list[BadRow] = []
        over_long: list[dict[str, object]] = []
        kept: list[Encoded] = []
        places: list[tuple[int, int]] = []
        rows = list(block.rows())
        for row, result in zip(rows, self.encode(rows), strict=True):
            try:
                samples, action = self._fitted(result)
            except UnusableError as error:
                bad.append(BadRow(row.file, row.line, str(error), excerpt(row.record)))
                continue
            if action:
                assert isinstance(result, list)
                num_tokens = max(len(sample.input_ids) for sample in result)
                entry = {"line": row.line, "num_tokens": num_tokens, "action": action}
                over_long.append({"file": str(row.file), **entry})
            kept += samples
            places += [(file_index, row.line)] * len(samples)
        found = np.zeros(len(kept), dtype=ROW)
        tokens = np.zeros(0, dtype=TOKEN)
        if kept:
            ids = np.concatenate([sample.input_ids for sample in kept], dtype=TOKEN)
            mask = np.concatenate([sample.loss_mask for sample in kept])
            tokens = np.where(mask, ids | SUPERVISED, ids)
            found["file"], found["line"] = np.array(places).T
            found["num_tokens"] = [len(sample.input_ids) for sample in kept]
            found["num_loss_tokens"] = [_num_labels(sample) for sample in kept]
            found["end"] = np.cumsum(found["num_tokens"], dtype=np.int64)
        self._seen.counts.update(
            num_rows=len(rows),
            num_bad_rows=len(bad),
            num_samples=len(found),
            num_tokens=len(tokens),
            num_loss_tokens=int(found["num_loss_tokens"].sum()),
        )
        return PreparedRows(tokens, found, bad, over_long, self._seen.take())

    def _fitted(self, result: Result) -> tuple[list[Encoded], str]:
        """Return samples of at most the longest length, and what was done to over-long ones.
        Raises `UnusableError`.
        """
        if isinstance(result, UnusableError):
            raise result
        max_length, truncation = self._options.max_length, self._options.truncation
        num_tokens = max(len(sample.input_ids) for sample in result)
        if num_tokens > max_length and truncation == "drop":
            self._seen.counts["num_dropped"] += 1
            return [], "dropped"
        samples, when = result, ""
        if num_tokens > max_length and truncation in ("left", "right"):
            part = slice(-max_length, None) if truncation == "left" else slice(max_length)
            samples = [_part(sample, part) for sample in result]
            when = f" after data.truncation={truncation} to data.max_length {max_length}"
        elif num_tokens > max_length:
            if truncation != "split" or self._options.keys.text_key is None:
                hint = "; data.truncation=split is for text_key alone" * (truncation == "split")
                raise UnusableError(
                    f"over-long: {num_tokens} tokens > data.max_length {max_length}{hint}"
                )
            samples = _pieces(result[0], max_length)
        trained = [sample for sample in samples if _num_labels(sample)]
        if not trained:
            num_tokens = min(num_tokens, max_length)
            raise UnusableError(
                f"nothing supervised: none of {num_tokens} tokens carries a label{when}"
            )
        if not when:
            return trained, ""
        before, after = (sum(len(s.input_ids) for s in part) for part in (result, samples))
        self._seen.counts.update(num_truncated=1, num_cut_tokens=before - after)
        return trained, "cut"


def _num_labels(sample: Encoded) -> int:
    return int(np.count_nonzero(sample.loss_mask[1:]))


def _part(sample: Encoded, part: slice) -> Encoded:
    return Encoded(sample.input_ids[part], sample.loss_mask[part])


def _pieces(sample: Encoded, max_length: int) -> list[Encoded]:
    """Cut a text into samples. Each begins with the last token of the one before, which predicts
    the next, so that no label is lost and none comes twice.
    """
    starts = range(0, len(sample.input_ids) - 1, max(1, max_length - 1))
    return [_part(sample, slice(start, start + max_length)) for start in starts]


# Processes


def prepare_blocks(
    encoder: RowEncoder, blocks: Iterable[Located]
) -> Generator[PreparedRows, None, None]:
    """Prepare blocks in their order; a bounded number is read ahead. Raises `DataError` as the
    encoder does.
    """
    blocks, num_rows = iter(blocks), 0
    num_processes = len(os.sched_getaffinity(0))
    for file_index, block in blocks:
        yield encoder.prepare(file_index, block)
        num_rows += len(block)
        if num_rows >= ROWS_HERE and num_processes > 1:
            break
    yield from _in_processes(encoder, blocks, num_processes)


def _in_processes(
    encoder: RowEncoder, blocks: Iterator[Located], num_processes: int
) -> Iterator[PreparedRows]:
    """Fork processes, which spares each of them the imports; they do not touch a device."""
    running: deque[Future[PreparedRows]] = deque()
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (encoder, os.getpid()))
    try:
        for located in blocks:
            running.append(pool.submit(_prepare, *located))
            if len(running) > NUM_BLOCKS_AHEAD * num_processes:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {num_processes} processes that prepare data was killed, most likely because "
            f"memory ran out: fewer CPU cores make fewer of them (taskset -c 0-3 …)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: RowEncoder
"""The encoder of a process that prepares for another one."""


def _begin(encoder: RowEncoder, parent_pid: int) -> None:
    global _encoder
    become_worker(parent_pid, code=EXIT_CRASH)
    # the other CPUs are busy, and threads were not forked
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder


def _prepare(file_index: int, block: RowBlock) -> PreparedRows:
    return _encoder.prepare(file_index, block)


# Files


@dataclass(frozen=True)
class Summary:
    """What became of all rows: `num_rows` = kept rows + bad rows + dropped ones."""

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
    """Supervised turns whose reasoning the template leaves out; this count and the next three
    include unused rows."""
    num_conversations: int
    num_apart: int
    """Conversations of which each supervised turn became a sample."""
    num_unlike_prompt: int
    """Supervised turns that are not rendered as their generation prompt begins."""
    rows_by_shape: dict[str, int]
    """Number of rows by format; bad rows are included where the format was recognised."""
    unread_keys: dict[str, int]
    """Keys of messages that nothing reads, with the number of messages."""
    unread_columns: dict[str, int]
    """Columns that the format of a row does not read, with the number of rows."""
    end_token_ids: list[int]
    fingerprint: str

    @property
    def num_kept_rows(self) -> int:
        """Number of rows that have one sample or more."""
        return self.num_rows - self.num_bad_rows - self.num_dropped


class SampleWriter:
    """Fills a directory with tokens, rows and lists of bad and over-long rows; complete when
    left.
    """

    def __init__(self, directory: Path, options: PrepareOptions) -> None:
        self._options, self._seen = options, Seen()
        self._end = 0
        # of ids, mask and bounds of samples in their order; checkpoints name their digest
        self._digests = hashlib.sha256(), hashlib.sha256(), hashlib.sha256(np.int64(0).tobytes())
        self._kinds: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}
        """Where the first rows are, for each of the first reasons."""
        self.is_cut = False
        """Whether the rest of the rows was not read, because all before are bad."""
        with ExitStack() as stack:
            binary = [stack.enter_context((directory / name).open("wb")) for name in (TOKENS, ROWS)]
            # lone surrogates, as in the name of a file that is not UTF-8, become JSON's escapes
            text = [
                stack.enter_context(
                    (directory / name).open("w", encoding="utf-8", errors="backslashreplace")
                )
                for name in (BAD_ROWS, OVER_LONG_ROWS)
            ]
            (self._tokens, self._rows), (self._bad, self._over_long) = binary, text
            self._files = stack.pop_all()

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()

    def write(
        self, encoder: RowEncoder, files: list[Path], progress: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare every row of `files` in order; `progress` is called after each block.

        Where one bad row ends the run, rows are read only until the first good one is found
        missing: after a block without any.
        """
        with closing(prepare_blocks(encoder, self._blocks(files))) as parts:
            for part in parts:
                self.add(part)
                progress()
                counts = self._seen.counts
                if self._options.on_bad_row == "error" and (
                    counts["num_bad_rows"] == counts["num_rows"] > 0
                ):
                    self.is_cut = next(parts, None) is not None
                    break

    def _blocks(self, files: list[Path]) -> Iterator[Located]:
        """Yield the rows of all files up to `max_samples`."""
        num_left = self._options.max_samples
        for file_index, path in enumerate(files):
            for block in iter_blocks(path, columns_of(self._options.keys)):
                if self._options.max_samples >= 0:
                    block = block.head(num_left)
                    num_left -= len(block)
                if not len(block):
                    return
                yield file_index, block

    def add(self, part: PreparedRows) -> None:
        """Append samples, and list the rows that have none or were cut."""
        part.samples["end"] += self._end
        self._end += len(part.tokens)
        self._tokens.write(part.tokens.data)
        self._rows.write(part.samples.data)
        arrays = part.tokens & ~SUPERVISED, part.tokens < 0, part.samples["end"]
        for digest, array in zip(self._digests, arrays, strict=True):
            digest.update(array.tobytes())
        self._seen.add(part.seen)
        for row in part.bad:
            self._kinds[row.reason.partition(":")[0]] += 1
            if row.reason in self._places or len(self._places) < NUM_REASONS:
                self._places.setdefault(row.reason, []).append(location(row.file, row.line))
                del self._places[row.reason][NUM_PLACES + 1 :]
        bad = [row._asdict() | {"file": str(row.file)} for row in part.bad]
        for file, entries in ((self._bad, bad), (self._over_long, part.over_long)):
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def bad_row_lines(self) -> list[str]:
        """Return the first reasons with their first places, and the counts by kind."""
        lines = []
        for reason, places in self._places.items():
            more = ", …" if len(places) > NUM_PLACES else ""
            lines.append(f"  {', '.join(places[:NUM_PLACES])}{more}: {reason}")
        if self.is_cut:
            lines.append("  the rows after these were not read")
        kinds = ", ".join(f"{kind} {count}" for kind, count in self._kinds.most_common())
        return [*lines, f"by reason: {kinds}"]

    def summary(self) -> Summary:
        seen = self._seen
        counts = {
            field.name: seen.counts[field.name]
            for field in dataclasses.fields(Summary)
            if field.type is int
        }
        digests = "".join(digest.hexdigest() for digest in self._digests)
        return Summary(
            **counts,
            bad_rows_by_kind=dict(self._kinds.most_common()),
            rows_by_shape=dict(seen.rows_by_shape),
            unread_keys=dict(seen.unread_keys.most_common()),
            unread_columns=dict(seen.unread_columns.most_common()),
            end_token_ids=sorted(seen.end_token_ids),
            fingerprint=hashlib.sha256(digests.encode()).hexdigest(),
        )
