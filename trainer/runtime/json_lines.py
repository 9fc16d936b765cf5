"""JSON on disk: files of one object a line, appended whole and read while they grow; objects;
numbers (floor 1).

No torch.
"""

import dataclasses
import errno
import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import CannotWriteError
from trainer.runtime.files import open_regular, read_regular, regular_opener
from trainer.runtime.text import as_ranges

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0
BLOCK_BYTES = 2**17
MAX_LINE_BYTES = 2**26
"""A longer line is passed over: it must not fill the memory."""
MAX_FILE_BYTES = 2**34
"""No run writes as much; to read more would take hours."""
MAX_WAITING_BYTES = 2**25
"""Of lines that cannot be written now: more than 10,000 rows."""


def strict(value: Any, *, nonfinite: Callable[[float], str | None] = str) -> Any:
    """The value as JSON has it: dataclasses as objects, keys and all else that JSON lacks as text.

    `nonfinite` makes something of NaN and infinities: their names, unless told otherwise.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        return number if math.isfinite(number) else nonfinite(number)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict(item, nonfinite=nonfinite) for key, item in value.items()}
    return (
        [strict(item, nonfinite=nonfinite) for item in value]
        if isinstance(value, list | tuple)
        else str(value)
    )


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; {} without the file, or where it holds or is anything
    else.
    """
    with suppress(OSError):
        content = parsed(read_regular(path))
        return content if isinstance(content, dict) else {}
    return {}


def parsed(text: str | bytes) -> Any:
    """The JSON value; None where the text is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested mappings as one with joined names; at most 32 levels, deeper ones stay as they are."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.count(separator) < 32:
            leaves |= flat(value, f"{name}{separator}", separator)
        else:
            leaves[name] = value
    return leaves


class JsonLines:
    """(offset in bytes, JSON object) of the lines of a file, each time those that were added since
    the last.

    Blank lines are passed over, others that are no object are counted, too. Of a line
    that begins with a torn one the whole one at its end is read: lines of a file begin alike. A
    last line without its end waits for it, unless `is_final` says that it is all there will be.
    None without the file. Raises `OSError` for anything but a regular file of at most
    `MAX_FILE_BYTES`.
    """

    def __init__(self, path: Path, *, is_final: bool = False) -> None:
        self._path, self._is_final = path, is_final
        self._offset = 0
        self.num_unparsed = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with (
            suppress(FileNotFoundError),
            open_regular(self._path, limit_bytes=MAX_FILE_BYTES) as file,
        ):
            file.seek(self._offset)
            block, begin = [], self._offset
            for place in self._lines(file):
                block.append(place)
                if self._offset - begin >= BLOCK_BYTES:
                    yield from self._objects(block)
                    block, begin = [], self._offset
            yield from self._objects(block)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        is_passing_over = False
        while line := file.readline(MAX_LINE_BYTES):
            is_part = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if not (is_part or self._is_final or line.endswith(b"\n")):
                return
            start, self._offset = self._offset, self._offset + len(line)
            if is_part or is_passing_over:
                self.num_unparsed += not is_passing_over
                is_passing_over = is_part
            elif line.strip():
                yield start, line

    def _objects(self, block: list[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """All lines at once as one JSON array, which takes half the time; line by line where
        one of them is odd.
        """
        contents = parsed(b"[" + b",".join([line for _, line in block]) + b"]")
        if contents is None or len(contents) != len(block):
            contents = [parsed(line) for _, line in block]
        for (start, line), content in zip(block, contents, strict=True):
            if isinstance(content, dict):
                yield start, content
                continue
            self.num_unparsed += 1
            length = line.rfind(line[:6])
            if length > 0 and isinstance(whole := parsed(line[length:]), dict):
                yield start + length, whole


class AppendFile:
    """JSON objects as lines, each by one `write` on an O_APPEND descriptor: a kill of the process
    loses none.

    A separate thread syncs them to the disk, every `SYNC_INTERVAL_S` and when asked: a slow disk
    delays nobody. Raises `CannotWriteError` when the file cannot be opened, or is a link or
    anything but a regular file.

    While lines cannot be written (disk full) training goes on. They wait in memory, at most
    `MAX_WAITING_BYTES`, and are written in order with the first one that fits; `close` names the
    steps of those that are lost. Where the file is moved away or removed, the lines go on in a new
    file at the path.

    `is_guest`: the file is another process's, which alone takes torn lines back: what seems torn
    may be its own.
    """

    def __init__(self, path: Path, *, is_guest: bool = False) -> None:
        self._path, self._is_guest = path, is_guest
        self._is_closing = self._is_dirty = False
        self._error: OSError | None = None
        """Why lines wait; None while they can be written."""
        self._waiting: deque[tuple[object, bytes]] = deque()
        """The step of each line, and the line."""
        self._num_waiting_bytes, self._num_dropped = 0, 0
        self._lost_steps: set[int] = set()
        self._moved_away: list[int] = []
        """Descriptors of files that no longer have the path: the thread syncs and closes them."""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._sync, name=f"sync-{path.name}", daemon=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            fix = "free space or choose another directory"
            if error.errno in (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR):
                fix = f"Fix: move {path} away; a run writes this file itself and follows no link"
            raise CannotWriteError(f"cannot open {path}: {error}; {fix}") from error

    def append(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._waiting.append((content.get("step"), line))
        self._num_waiting_bytes += len(line)
        self._write_waiting()
        self._is_dirty = True
        if self._thread.ident is None:
            self._thread.start()

    def sync_soon(self) -> None:
        self._wake.set()

    def close(self) -> None:
        if self._waiting:
            self._write_waiting()
        self._is_closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            for descriptor in (self._descriptor, *self._moved_away):
                os.close(descriptor)
        self._tell_lost()

    def _open(self) -> int:
        """Raises `OSError`."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = regular_opener(flags, follow_links=False)(str(self._path), 0)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > MAX_FILE_BYTES:
            os.close(descriptor)
            raise OSError(
                errno.EFBIG,
                f"has {size_bytes} bytes; at most {MAX_FILE_BYTES} are read",
                str(self._path),
            )
        if not self._is_guest:
            _drop_torn_tail(descriptor)
        return descriptor

    def _write_waiting(self) -> None:
        """Write the lines that wait, in order, until one does not fit."""
        num_before = len(self._waiting)
        try:
            self._stay_at_path()
            while self._waiting:
                line = self._waiting[0][1]
                self._write(line)
                self._waiting.popleft()
                self._num_waiting_bytes -= len(line)
        except OSError as error:
            if self._error is None:
                logger.warning(
                    "cannot write %s: %s; training goes on, rows wait in memory", self._path, error
                )
            self._error = error
            while self._num_waiting_bytes > MAX_WAITING_BYTES:
                self._drop_oldest()
            return
        if self._error is not None:
            logger.info(
                "%s can be written again: %d rows that waited are in it", self._path, num_before - 1
            )
        self._error = None

    def _write(self, line: bytes) -> None:
        """The whole line or nothing. Raises `OSError`."""
        num_written = os.write(self._descriptor, line)
        if num_written < len(line):
            if not self._is_guest:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_written)
            raise OSError(errno.ENOSPC, f"only {num_written} of {len(line)} bytes fitted")

    def _stay_at_path(self) -> None:
        """Open a new file where the path no longer names the one that is open, as after a rotation
        of logs.

        Where the whole directory is gone, the open file is all there is. Raises `OSError`.
        """
        try:
            if os.path.samestat(os.lstat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                return
        descriptor = self._open()
        self._moved_away.append(self._descriptor)
        self._descriptor = descriptor
        logger.warning(
            "%s was moved away or removed while this run was training: rows go on in a new file; "
            "the rows before are in the one that was moved",
            self._path,
        )

    def _drop_oldest(self) -> None:
        step, line = self._waiting.popleft()
        self._num_waiting_bytes -= len(line)
        self._num_dropped += 1
        if isinstance(step, int):
            self._lost_steps.add(step)

    def _tell_lost(self) -> None:
        while self._waiting:
            self._drop_oldest()
        if self._num_dropped:
            steps = f" of steps {as_ranges(self._lost_steps)}" if self._lost_steps else ""
            logger.warning(
                "%s lacks %d rows%s, which could not be written",
                self._path,
                self._num_dropped,
                steps,
            )

    def _sync(self) -> None:
        is_last = has_failed = False
        while not is_last:
            self._wake.wait(SYNC_INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            if not self._is_dirty:
                continue
            self._is_dirty = False
            try:
                while self._moved_away:
                    descriptor = self._moved_away.pop()
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
                os.fsync(self._descriptor)
                has_failed = False
            except OSError as error:
                if not has_failed:
                    logger.warning(
                        "cannot sync %s: %s; a crash of the machine may lose rows",
                        self._path,
                        error,
                    )
                has_failed = True


def _drop_torn_tail(descriptor: int) -> None:
    """Cut what follows the last newline: no row is complete without it, and the next one must
    not glue to a part.
    """
    end = keep = os.fstat(descriptor).st_size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < end:
        os.ftruncate(descriptor, keep)
