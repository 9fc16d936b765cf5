"""Rows to samples, in their order: a few in this process, many in one process for each CPU."""

import itertools
import os
import pickle
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.chat import ChatEncoder
from trainer.data.rows import Row, Seen, UnusableError
from trainer.data.shapes import RowParser
from trainer.data.tokens import Encoded
from trainer.errors import EXIT_CRASH
from trainer.runtime.signals import become_worker

ROWS_HERE = 2000  # before it is worth to start processes
CHUNK_ROWS, CHUNK_BYTES = 500, 1 << 20  # what a process gets at once: it ends with the first of them that is reached
NUM_CHUNKS_AHEAD = 2  # for each process

Result = list[Encoded] | UnusableError


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
    turns: str = "auto"
    train_on: str = "all"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """That the tokenizer got since rows of tokens may have been made, with their ids."""


class RowEncoder:
    """What `options` make of rows with a tokenizer. Raises `DataError` as `ChatEncoder` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> None:
        self.seen = Seen()
        self._chats = ChatEncoder(
            tokenizer,
            template_kwargs=options.template_kwargs,
            special_in_content=options.special_in_content,
            turns=options.turns,
            train_on=options.train_on,
            seen=self.seen,
        )
        self._keys = options.keys, tokenizer, options.new_tokens
        self._parser = RowParser(*self._keys, self.seen.rows_by_shape)

    def encode(self, rows: Iterable[Row]) -> Generator[Result, None, None]:
        """The samples of each row, or the reason why it has none. A bounded number of rows is read ahead."""
        rows = iter(rows)
        yield from self._encode_here(itertools.islice(rows, ROWS_HERE))
        num_processes = len(os.sched_getaffinity(0))
        if num_processes == 1 or current_process().daemon:  # which multiprocessing gives no children
            yield from self._encode_here(rows)
        elif (row := next(rows, None)) is not None:
            yield from self._encode_in_processes(itertools.chain([row], rows), num_processes)

    def check(self, row: Row) -> UnusableError | None:
        """Why a row is none, as far as can be told without rendering it; it is not counted."""
        item = RowParser(*self._keys).parse(row)
        return item if isinstance(item, UnusableError) else None

    def _encode_here(self, rows: Iterable[Row]) -> Iterator[Result]:
        return self._chats.encode(map(self._parser.parse, rows))

    def _encode_in_processes(self, rows: Iterator[Row], num_processes: int) -> Iterator[Result]:
        """They are forked, which spares each of them the imports, and have nothing to do with a device."""
        running: deque[Future[tuple[list[Result], Seen]]] = deque()
        pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (self, os.getpid()))
        try:
            for chunk in _chunks(rows):
                running.append(pool.submit(_encode_chunk, chunk))
                if len(running) > NUM_CHUNKS_AHEAD * num_processes:
                    yield from self._taken_over(running.popleft())
            while running:
                yield from self._taken_over(running.popleft())
        except BrokenProcessPool as error:
            raise RuntimeError("a process that prepares data was killed: is there enough memory?") from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _taken_over(self, chunk: Future[tuple[list[Result], Seen]]) -> list[Result]:
        results, seen = chunk.result()
        self.seen.add(seen)
        return results

    def encode_chunk(self, rows: list[bytes]) -> tuple[list[Result], Seen]:
        """Of pickled rows, with what was seen in these alone."""
        self.seen.clear()
        return list(self._encode_here([pickle.loads(row) for row in rows])), self.seen


_encoder: RowEncoder
"""Of a process that encodes for another one."""


def _begin(encoder: RowEncoder, parent_pid: int) -> None:
    global _encoder
    become_worker(parent_pid, code=EXIT_CRASH)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other CPUs are busy, and threads were not forked
    _encoder = encoder


def _encode_chunk(rows: list[bytes]) -> tuple[list[Result], Seen]:
    return _encoder.encode_chunk(rows)


def _chunks(rows: Iterator[Row]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    num_bytes = 0
    for row in rows:
        chunk.append(pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL))
        num_bytes += len(chunk[-1])
        if len(chunk) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
