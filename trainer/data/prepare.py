"""Prepares samples: encodes rows, cuts them to length, counts them, and appends them to files.

A small dataset is prepared in this process, a large one in one process per CPU.
"""

import hashlib
import json
import os
import reprlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import current_process, get_context
from pathlib import Path

import numpy as np

from trainer.data.chat import RowEncoder
from trainer.data.formats import columns_of
from trainer.data.readers import RowBlock, iter_blocks
from trainer.data.rows import PrepareOptions, Summary, UnusableError
from trainer.data.tokens import Encoded
from trainer.errors import EXIT_CRASH
from trainer.runtime.signals import become_worker

TOKENS = "tokens.bin"
ROWS = "rows.bin"
"""The files with the `TOKEN`s of all samples, end to end, and with the `ROW` of each sample."""
BAD_ROWS = "bad_rows.jsonl"
OVER_LONG_ROWS = "over_long_rows.jsonl"
TOKEN = np.dtype("<i4")
"""A token id. The sign bit is set if the token is supervised."""
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
"""A sample: index of its file, line in that file, number of tokens and of labels, and end of its
tokens. The first token is never a label, because nothing predicts it.
"""
NUM_BLOCKS_AHEAD = 2  # per process

Located = tuple[int, RowBlock]
"""(index of a file, block of its rows)."""


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """The samples of a block of rows, and lists of bad and over-long rows."""

    tokens: np.ndarray
    """The `TOKEN`s of all samples, end to end."""
    samples: np.ndarray
    """The `ROW` of each sample. Its `end` is an index into `tokens`."""
    bad: list[dict[str, object]]
    over_long: list[dict[str, object]]
    summary: Summary


def prepare_rows(encoder: RowEncoder, file_index: int, block: RowBlock) -> PreparedRows:
    """Encode a block of rows. Rows that are too long are cut, dropped or listed as bad."""
    bad: list[dict[str, object]] = []
    over_long: list[dict[str, object]] = []
    found: list[tuple[int, ...]] = []
    tokens = [np.zeros(0, dtype=TOKEN)]
    rows = list(block.rows())
    seen = encoder.seen
    for row in rows:
        place = {"file": str(row.file), "line": row.line}
        try:
            samples, num_tokens, action = _fitted(encoder, encoder.encode(row))
        except UnusableError as error:
            bad.append(place | {"reason": str(error), "excerpt": reprlib.repr(row.record)})
            seen.bad_rows_by_kind[str(error).partition(":")[0]] += 1
            continue
        if action:
            over_long.append(place | {"num_tokens": num_tokens, "action": action})
        for sample in samples:
            tokens.append(sample.input_ids | sample.loss_mask * SUPERVISED)
            found.append((file_index, row.line, len(sample.input_ids), _num_labels(sample), 0))
    kept = np.array(found, dtype=ROW)
    kept["end"] = np.cumsum(kept["num_tokens"], dtype=np.int64)
    joined = np.concatenate(tokens)
    seen.num_rows += len(rows)
    seen.num_bad_rows += len(bad)
    seen.num_samples += len(kept)
    seen.num_tokens += int(kept["num_tokens"].sum())
    seen.num_loss_tokens += int(kept["num_loss_tokens"].sum())
    unknown_id = encoder.tokenizer.unk_token_id
    if unknown_id is not None and unknown_id not in seen.end_token_ids:  # GPT-2 has one for both
        seen.num_unknown += int(np.count_nonzero(joined == (unknown_id | SUPERVISED)))
    return PreparedRows(joined, kept, bad, over_long, seen.take())


def _fitted(encoder: RowEncoder, samples: list[Encoded]) -> tuple[list[Encoded], int, str]:
    """Return (samples of at most `max_length` tokens, length of the longest sample before cutting,
    action). The action is `cut` or `dropped` for an over-long row, '' for any other row. Raises
    `UnusableError`.
    """
    max_length = encoder.options.max_length
    truncation = encoder.options.truncation
    num_tokens = max(len(sample.input_ids) for sample in samples)
    fitting = samples
    action = ""
    if num_tokens > max_length:
        if truncation == "drop":
            encoder.seen.num_dropped += 1
            return [], num_tokens, "dropped"
        if truncation in ("left", "right"):
            part = slice(-max_length, None) if truncation == "left" else slice(max_length)
            fitting = [_part(sample, part) for sample in samples]
            action = "cut"
        elif truncation == "split" and encoder.options.keys.text_key is not None:
            fitting = _pieces(samples[0], max_length)
        else:
            raise UnusableError(f"over-long: {num_tokens} tokens > data.max_length={max_length}")
    trained = [sample for sample in fitting if _num_labels(sample)]
    if not trained:
        raise UnusableError(
            f"nothing supervised: none of {min(num_tokens, max_length)} tokens has a label"
            f"{action and f' after data.truncation={truncation}'}"
        )
    if action:
        encoder.seen.num_truncated += 1
        encoder.seen.num_cut_tokens += sum(
            max(0, len(sample.input_ids) - max_length) for sample in samples
        )
    return trained, num_tokens, action


def _num_labels(sample: Encoded) -> int:
    return int(np.count_nonzero(sample.loss_mask[1:]))


def _part(sample: Encoded, part: slice) -> Encoded:
    return Encoded(sample.input_ids[part], sample.loss_mask[part])


def _pieces(sample: Encoded, max_length: int) -> list[Encoded]:
    """Cut a text into samples. Each begins with the last token of the previous one, which predicts
    the next token, so that each label occurs exactly once.
    """
    starts = range(0, len(sample.input_ids) - 1, max(1, max_length - 1))
    return [_part(sample, slice(start, start + max_length)) for start in starts]


# Processes


def prepare_blocks(
    encoder: RowEncoder, blocks: Iterable[Located]
) -> Generator[PreparedRows, None, None]:
    """Yield the prepared blocks in order, reading only a limited number ahead. Raises `DataError`
    if the encoder does.
    """
    blocks = iter(blocks)
    first = list(islice(blocks, 2))
    blocks = chain(first, blocks)
    num_processes = len(os.sched_getaffinity(0))
    # multiprocessing does not allow daemonic processes to have children
    if len(first) < 2 or num_processes == 1 or current_process().daemon:
        for located in blocks:
            yield prepare_rows(encoder, *located)
        return
    # fork saves the imports, and is safe because these processes use no GPU
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (encoder, os.getpid()))
    running: deque[Future[PreparedRows]] = deque()
    try:
        for located in blocks:
            running.append(pool.submit(_prepare, *located))
            if len(running) > NUM_BLOCKS_AHEAD * num_processes:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of the {num_processes} data preparation processes was killed, most likely for "
            f"lack of memory; with fewer CPUs (taskset -c 0-3 …) there are fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: RowEncoder
"""The encoder of this worker process."""


def _begin(encoder: RowEncoder, parent_pid: int) -> None:
    global _encoder
    become_worker(parent_pid, code=EXIT_CRASH)
    # the other CPUs are busy, and a fork does not copy the tokenizer's threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder


def _prepare(file_index: int, block: RowBlock) -> PreparedRows:
    return prepare_rows(_encoder, file_index, block)


# Files


def write_samples(
    directory: Path,
    encoder: RowEncoder,
    files: list[Path],
    options: PrepareOptions,
    progress: Callable[[int], None],
) -> Summary:
    """Prepare all rows of `files` in order. Append the samples, and lists of bad and over-long
    rows, to files in `directory`. Return counts of the rows.

    `progress` is called with the number of samples after each block. If bad rows are errors,
    reading stops after a first block without a good row.
    """
    summary = Summary()
    # of the ids, masks and bounds of all samples in order
    digests = hashlib.sha256(), hashlib.sha256(), hashlib.sha256(np.int64(0).tobytes())
    with closing(prepare_blocks(encoder, _blocks(files, options))) as parts:
        for part in parts:
            part.samples["end"] += summary.num_tokens
            summary.add(part.summary)
            contents = {
                TOKENS: part.tokens.tobytes(),
                ROWS: part.samples.tobytes(),
                BAD_ROWS: _json_lines(part.bad),
                OVER_LONG_ROWS: _json_lines(part.over_long),
            }
            for name, content in contents.items():
                with (directory / name).open("ab") as file:
                    file.write(content)
            arrays = part.tokens & ~SUPERVISED, part.tokens < 0, part.samples["end"]
            for digest, array in zip(digests, arrays, strict=True):
                digest.update(array.tobytes())
            progress(summary.num_samples)
            if options.on_bad_row == "error" and summary.num_bad_rows == summary.num_rows:
                break
    joined = "".join(digest.hexdigest() for digest in digests)
    summary.fingerprint = hashlib.sha256(joined.encode()).hexdigest()
    return summary


def _blocks(files: list[Path], options: PrepareOptions) -> Iterator[Located]:
    """Yield the rows of all files, at most `max_samples`."""
    num_left = options.max_samples
    for file_index, path in enumerate(files):
        for block in iter_blocks(path, columns_of(options.keys)):
            if options.max_samples >= 0:
                block = block.head(num_left)
                num_left -= len(block)
            if not len(block):
                return
            yield file_index, block


def _json_lines(entries: list[dict[str, object]]) -> bytes:
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    # lone surrogates, as in a file name that is not UTF-8, become JSON escapes
    return text.encode("utf-8", "backslashreplace")
