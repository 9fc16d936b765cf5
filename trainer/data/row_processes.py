"""Blocks of rows to what becomes of them, in their order: a few in this process, many in one
process for each CPU.
"""

import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context

from trainer.data.readers import RowBlock
from trainer.data.row_encoder import PreparedRows, RowEncoder
from trainer.errors import EXIT_CRASH
from trainer.runtime.signals import become_worker

ROWS_HERE = 500  # before it is worth to start processes
NUM_BLOCKS_AHEAD = 2  # for each process
LOOK_EVERY_S = 1.0

Located = tuple[int, RowBlock]
"""A block, and the index of its file."""


def prepare_blocks(
    encoder: RowEncoder, blocks: Iterable[Located], progress: Callable[[], None] = lambda: None
) -> Generator[PreparedRows, None, None]:
    """A bounded number of blocks is read ahead. `progress` is called while rows are rendered, here
    or there: a block can take long. Raises `DataError` as the encoder does.
    """
    blocks, num_rows = iter(blocks), 0
    num_processes = len(os.sched_getaffinity(0))
    # which multiprocessing gives no children
    is_alone = num_processes == 1 or current_process().daemon
    for file_index, block in blocks:
        yield encoder.prepare(file_index, block, progress)
        num_rows += len(block)
        if num_rows >= ROWS_HERE and not is_alone:
            break
    if (following := next(blocks, None)) is not None:
        yield from _in_processes(
            encoder, itertools.chain([following], blocks), num_processes, progress
        )


def _in_processes(
    encoder: RowEncoder, blocks: Iterator[Located], num_processes: int, progress: Callable[[], None]
) -> Iterator[PreparedRows]:
    """They are forked, which spares each of them the imports, and have nothing to do with a
    device.
    """
    running: deque[Future[PreparedRows]] = deque()
    rows_begun = _RowsBegun()
    pool = ProcessPoolExecutor(
        num_processes, get_context("fork"), _begin, (encoder, os.getpid(), rows_begun)
    )
    try:
        for located in blocks:
            running.append(pool.submit(_prepare, *located))
            if len(running) > NUM_BLOCKS_AHEAD * num_processes:
                yield _result(running.popleft(), rows_begun, progress)
        while running:
            yield _result(running.popleft(), rows_begun, progress)
    except BrokenProcessPool as error:
        text = f"one of {num_processes} processes that prepare data was killed, most likely because memory ran out"
        raise RuntimeError(
            f"{text}: fewer CPU cores make fewer of them (taskset -c 0-3 …)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _RowsBegun:
    """Counted by processes, looked at by the one that forked them: one that renders for ever
    adds none.
    """

    def __init__(self) -> None:
        self._byte, self._seen = mmap.mmap(-1, 1), 0

    def add(self) -> None:
        self._byte[0] = (self._byte[0] + 1) % 256

    def have_grown(self) -> bool:
        """Since this was asked last."""
        before, self._seen = self._seen, self._byte[0]
        return before != self._seen


def _result(
    future: Future[PreparedRows], rows_begun: _RowsBegun, progress: Callable[[], None]
) -> PreparedRows:
    while not wait([future], LOOK_EVERY_S).done:
        if rows_begun.have_grown():
            progress()
    return future.result()


_encoder: RowEncoder
"""Of a process that encodes for another one."""
_rows_begun: _RowsBegun


def _begin(encoder: RowEncoder, parent_pid: int, rows_begun: _RowsBegun) -> None:
    global _encoder, _rows_begun
    become_worker(parent_pid, code=EXIT_CRASH)
    # the other CPUs are busy, and threads were not forked
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder, _rows_begun = encoder, rows_begun


def _prepare(file_index: int, block: RowBlock) -> PreparedRows:
    return _encoder.prepare(file_index, block, _rows_begun.add)
