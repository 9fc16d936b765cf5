"""JSON on disk: files of one object a line, appended whole and read while they grow; objects;
numbers.

No torch.
"""

import dataclasses
import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import CannotWriteError
from trainer.runtime.files import open_regular, read_regular, regular_opener
from trainer.runtime.processes import begun
from trainer.runtime.text import as_ranges

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 2**26
"""A longer line is passed over: it must not fill the memory."""
MAX_FILE_BYTES = 2**34
"""No run writes as much; to read more would take hours."""
MAX_WAITING_BYTES = 2**25
"""Limit for lines that cannot be written now: more than 10,000 rows."""


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
    if isinstance(value, list | tuple):
        return [strict(item, nonfinite=nonfinite) for item in value]
    return str(value)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; {} for anything else."""
    try:
        content = parsed(read_regular(path))
    except OSError:
        content = None
    return content if isinstance(content, dict) else {}


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

    Blank lines are skipped; others that are no object are skipped and counted. Of a line that
    begins with a torn one the whole one at its end is read: lines of a file begin alike. A last
    line without its end waits for it, unless `is_final` says that it is all there will be. None
    without the file. Raises `OSError` for anything but a regular file of at most `MAX_FILE_BYTES`.
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
            for start, line in self._lines(file):
                content = parsed(line)
                if not isinstance(content, dict):
                    self.num_unparsed += 1
                    torn_bytes = line.rfind(line[:6])
                    start += torn_bytes
                    content = parsed(line[torn_bytes:]) if torn_bytes > 0 else None
                if isinstance(content, dict):
                    yield start, content

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of each line that is whole and not too long."""
        is_inside_long_line = False
        while line := file.readline(MAX_LINE_BYTES):
            is_part = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if not (is_part or self._is_final or line.endswith(b"\n")):
                return
            start = self._offset
            self._offset += len(line)
            if is_part or is_inside_long_line:
                self.num_unparsed += not is_inside_long_line
                is_inside_long_line = is_part
            elif line.strip():
                yield start, line


class AppendFile:
    """JSON objects as lines, each by one `write` on an O_APPEND descriptor: a kill of the process
    loses none.

    They are synced to the disk in the background, every `SYNC_INTERVAL_S` and when asked: a slow
    disk delays nobody. Raises `CannotWriteError` when the file cannot be opened, or is a link or
    anything but a regular file.

    While lines cannot be written (disk full) training goes on. They wait in memory, at most
    `MAX_WAITING_BYTES`, and are written in order with the first one that fits; `close` names the
    steps of those that are lost. Where the file is moved away or removed, the lines continue in a
    new file at the path.

    `is_guest`: another process owns the file, and alone takes torn lines back: what seems torn may
    be its own.
    """

    def __init__(self, path: Path, *, is_guest: bool = False) -> None:
        self._path, self._is_guest = path, is_guest
        self._error: OSError | None = None
        """The reason why lines wait; None while they can be written."""
        self._waiting: deque[tuple[object, bytes]] = deque()
        """The step of each line, and the line."""
        self._lost_steps: list[object] = []
        self._syncing: Future[None] | None = None
        self._synced_at = time.monotonic()
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
        self._write_waiting()

    def sync_soon(self) -> None:
        """Sync in the background, unless a slow disk still keeps the last sync waiting."""
        if self._syncing is None or self._syncing.done():
            self._synced_at = time.monotonic()
            self._syncing = self._sync(self._descriptor)

    def close(self) -> None:
        if self._waiting:
            self._write_waiting()
        with suppress(TimeoutError):
            self._sync(self._descriptor).result(CLOSE_TIMEOUT_S)
        os.close(self._descriptor)
        lost = [*self._lost_steps, *(step for step, _ in self._waiting)]
        if lost:
            numbers = as_ranges(step for step in lost if isinstance(step, int))
            steps = f" of steps {numbers}" if numbers else ""
            text = "%s lacks %d rows%s, which could not be written"
            logger.warning(text, self._path, len(lost), steps)

    def _open(self) -> int:
        """Raises `OSError`."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = regular_opener(flags, follow_links=False)(str(self._path), 0)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > MAX_FILE_BYTES:
            os.close(descriptor)
            text = f"has {size_bytes} bytes; at most {MAX_FILE_BYTES} are read"
            raise OSError(errno.EFBIG, text, str(self._path))
        if not self._is_guest:
            _drop_torn_tail(descriptor)
        return descriptor

    def _write_waiting(self) -> None:
        """Write the lines that wait, in order, until one does not fit."""
        num_waiting = len(self._waiting)
        try:
            self._stay_at_path()
            while self._waiting:
                self._write(self._waiting[0][1])
                self._waiting.popleft()
            if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
                self.sync_soon()
        except OSError as error:
            if self._error is None:
                text = "cannot write %s: %s; training goes on, rows wait in memory"
                logger.warning(text, self._path, error)
            self._error = error
            while sum(len(line) for _, line in self._waiting) > MAX_WAITING_BYTES:
                self._lost_steps.append(self._waiting.popleft()[0])
            return
        if self._error is not None:
            text = "%s can be written again: %d rows that waited are in it"
            logger.info(text, self._path, num_waiting - 1)
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
        moved, self._descriptor = self._descriptor, self._open()
        self._sync(moved)
        os.close(moved)
        logger.warning(
            "%s was moved away or removed while this run was training: rows go on in a new file; "
            "the rows before are in the one that was moved",
            self._path,
        )

    def _sync(self, descriptor: int) -> Future[None]:
        """Begin a sync of the file, on a descriptor that nobody else closes."""
        own = os.dup(descriptor)

        def sync() -> None:
            try:
                os.fsync(own)
            except OSError as error:
                text = "cannot sync %s: %s; a crash of the machine may lose rows"
                logger.warning(text, self._path, error)
            finally:
                os.close(own)

        return begun(sync, name=f"sync-{self._path.name}")


def _drop_torn_tail(descriptor: int) -> None:
    """Cut what follows the last newline: no row is complete without it, and the next one must
    not glue to a part.
    """
    size_bytes = keep = os.fstat(descriptor).st_size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        keep = start + newline + 1
        if newline >= 0:
            break
    if keep < size_bytes:
        os.ftruncate(descriptor, keep)
        # otherwise a power cut could mix the torn line with the lines that take its place
        os.fsync(descriptor)
