"""Reads and writes JSON on disk: files with one object per line, which are appended in whole lines
and read while they grow, and small files with one object. Imports no torch.
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
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import CannotWriteError
from trainer.runtime.files import open_regular, read_regular, regular_opener
from trainer.runtime.processes import begun

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 2**26
"""A longer line is skipped, so that it cannot fill the memory."""
MAX_FILE_BYTES = 2**34
"""No run writes more than this, and reading more would take hours."""


def strict(value: Any, *, nonfinite: Callable[[float], str | None] = str) -> Any:
    """Return the value as strict JSON: dataclasses become objects; keys and unknown types become
    text.

    `nonfinite` converts NaN and infinities, by default to their names.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        return number if math.isfinite(number) else nonfinite(number)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item, nonfinite=nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, nonfinite=nonfinite) for item in value]
    return str(value)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; {} for anything else."""
    try:
        content = parsed(read_regular(path))
    except OSError:
        return {}
    return content if isinstance(content, dict) else {}


def parsed(text: str | bytes) -> Any:
    """Return the JSON value; None if the text is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return nested mappings as one mapping with joined names. Mappings nested deeper than 32
    levels stay as they are.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.count(separator) < 32:
            leaves |= flat(value, f"{name}{separator}", separator)
        else:
            leaves[name] = value
    return leaves


@dataclass(eq=False)
class JsonLines:
    """Reads a file of JSON objects. Each iteration yields (offset in bytes, object) of the lines
    added since the previous iteration.

    Blank lines are skipped. Lines without an object are skipped and counted. A last line without a
    newline is read only if `is_final` is set, which means that the file is complete. A missing file
    counts as empty. Raises `OSError` for anything but a regular file of at most `MAX_FILE_BYTES`.
    """

    path: Path
    is_final: bool = False
    num_unparsed: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with (
            suppress(FileNotFoundError),
            open_regular(self.path, limit_bytes=MAX_FILE_BYTES) as file,
        ):
            file.seek(self._offset)
            for start, line in self._lines(file):
                content = parsed(line)
                if not isinstance(content, dict):
                    self.num_unparsed += 1
                    # a torn line may run into a whole one; all lines of a file begin alike
                    torn_bytes = line.rfind(line[:6])
                    start += torn_bytes
                    content = parsed(line[torn_bytes:]) if torn_bytes > 0 else None
                if isinstance(content, dict):
                    yield start, content

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of each line that is complete and not too long."""
        is_inside_long_line = False
        while line := file.readline(MAX_LINE_BYTES):
            is_part = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if not (is_part or self.is_final or line.endswith(b"\n")):
                return
            start = self._offset
            self._offset += len(line)
            if is_part or is_inside_long_line:
                self.num_unparsed += not is_inside_long_line
                is_inside_long_line = is_part
            elif line.strip():
                yield start, line


class AppendFile:
    """Appends JSON objects as lines, each with one `write` to an O_APPEND descriptor. No line is
    lost if the process is killed.

    A background thread syncs the file every `SYNC_INTERVAL_S` and on request, so that callers never
    wait for a slow disk. While the disk is full, lines wait in memory and are written in order when
    there is room. If the file is moved away or removed, the lines continue in a new file at the path.

    `is_guest`: another process owns the file. Only the owner cuts torn lines, because a guest may
    see a line that the owner is writing.

    Raises `CannotWriteError` if the file cannot be opened, is a link, or is not a regular file.
    """

    def __init__(self, path: Path, *, is_guest: bool = False) -> None:
        self._path = path
        self._is_guest = is_guest
        self._waiting: deque[bytes] = deque()
        self._is_failing = False
        self._syncing: Future[None] | None = None
        self._synced_at = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise CannotWriteError(
                f"cannot open {path}: {error}.\nFix: free space, choose a different directory, or move "
                f"{path} away: a run writes this file itself and does not follow links"
            ) from error

    def append(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False, separators=(",", ":"))
        self._waiting.append(line.encode() + b"\n")
        self._write_waiting()

    def sync_soon(self) -> None:
        """Sync in the background, unless a slow disk still delays the last sync."""
        if self._syncing is None or self._syncing.done():
            self._synced_at = time.monotonic()
            self._syncing = self._sync()

    def close(self) -> None:
        if self._waiting:
            self._write_waiting()
        with suppress(TimeoutError):
            self._sync().result(CLOSE_TIMEOUT_S)
        os.close(self._descriptor)
        if num_lost := len(self._waiting):
            logger.warning("%s lacks %d rows that could not be written", self._path, num_lost)

    def _open(self) -> int:
        """Open the file, and cut a torn last line unless this is a guest. Raises `OSError`."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        opener = regular_opener(flags, follow_links=False, limit_bytes=MAX_FILE_BYTES)
        descriptor = opener(str(self._path), 0)
        if not self._is_guest:
            _drop_torn_tail(descriptor)
        return descriptor

    def _write_waiting(self) -> None:
        """Write the waiting lines in order until one does not fit."""
        try:
            self._stay_at_path()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "cannot write %s: %s; training continues, and rows wait in memory",
                    self._path,
                    error,
                )
            self._is_failing = True
            return
        self._is_failing = False
        if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
            self.sync_soon()

    def _write(self, line: bytes) -> None:
        """Write the whole line or nothing. Raises `OSError`."""
        num_written = os.write(self._descriptor, line)
        if num_written < len(line):
            if not self._is_guest:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_written)
            raise OSError(errno.ENOSPC, f"only {num_written} of {len(line)} bytes fit")

    def _stay_at_path(self) -> None:
        """Open a new file if the path no longer points to the open file, for example after log
        rotation.

        If the whole directory is gone, the open file stays in use. Raises `OSError`.
        """
        try:
            if os.path.samestat(os.lstat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                return
        descriptor = self._open()
        self._sync()
        os.close(self._descriptor)
        self._descriptor = descriptor
        logger.warning(
            "%s was moved or removed during training; new rows go to a new file", self._path
        )

    def _sync(self) -> Future[None]:
        """Begin a sync on a duplicate descriptor, which no other code closes."""
        descriptor = os.dup(self._descriptor)

        def sync() -> None:
            try:
                os.fsync(descriptor)
            except OSError as error:
                text = "cannot sync %s: %s; a crash of the machine may lose rows"
                logger.warning(text, self._path, error)
            finally:
                os.close(descriptor)

        return begun(sync, name=f"sync-{self._path.name}")


def _drop_torn_tail(descriptor: int) -> None:
    """Cut everything after the last newline, because the next row must not continue an incomplete
    row.
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
        # otherwise a power cut could mix the torn line with the lines that replace it
        os.fsync(descriptor)
