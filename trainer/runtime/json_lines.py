"""JSON on disk: files of one object a line, appended whole and read while they grow; objects; numbers (floor 1).

No torch.
"""

import dataclasses
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import CannotWriteError

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0
BLOCK_BYTES = 2**17
MAX_LINE_BYTES = 2**26
"""A longer line is passed over: it must not fill the memory."""


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
    return [strict(item, nonfinite=nonfinite) for item in value] if isinstance(value, list | tuple) else str(value)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; {} without the file, or where it holds anything else."""
    with suppress(OSError):
        content = parsed(path.read_bytes())
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
    """(offset in bytes, JSON object) of the lines of a file, each time those that were added since the last.

    Blank lines and those that are not wanted are passed over, others that are no object are counted, too. Of a line
    that begins with a torn one the whole one at its end is read: lines of a file begin alike. A last line without its
    end waits for it, unless `is_final` says that it is all there will be. None without the file.
    """

    def __init__(
        self, path: Path, *, is_wanted: Callable[[bytes], object] = bytes.strip, is_final: bool = False
    ) -> None:
        self._path, self._is_wanted, self._is_final = path, is_wanted, is_final
        self._offset = 0
        self.num_unparsed = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
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
            elif self._is_wanted(line):
                yield start, line

    def _objects(self, block: list[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """All lines at once as one JSON array, which takes half the time; line by line where one of them is odd."""
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
    """JSON objects as lines, each by one `write` on an O_APPEND descriptor: a kill of the process loses none.

    A thread of its own makes them survive the machine as well, every `SYNC_INTERVAL_S` and when asked: a slow disk
    delays nobody. Raises `CannotWriteError` when the file cannot be opened. A line that cannot be written later (disk
    full) is lost with one warning: training goes on.

    `is_guest`: the file is another process's, which alone takes torn lines back: what seems torn may be its own.
    """

    def __init__(self, path: Path, *, is_guest: bool = False) -> None:
        self._path, self._is_guest = path, is_guest
        self._has_warned = self._is_closing = self._is_dirty = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._sync, name=f"sync-{path.name}", daemon=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if not is_guest:
                _drop_torn_tail(path)
        except OSError as error:
            raise CannotWriteError(f"cannot open {path}: {error}; free space or choose another directory") from error

    def append(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            num_written = os.write(self._descriptor, line)
            if num_written < len(line):
                if not self._is_guest:
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_written)
                raise OSError(f"only {num_written} of {len(line)} bytes fitted")
        except OSError as error:
            self._warn(error)
        self._is_dirty = True
        if self._thread.ident is None:
            self._thread.start()

    def sync_soon(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._descriptor)

    def _sync(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(SYNC_INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            if self._is_dirty:
                self._is_dirty = False
                try:
                    os.fsync(self._descriptor)
                except OSError as error:
                    self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            logger.warning(
                "cannot write %s: %s; training goes on, rows are lost until it works again", self._path, error
            )
        self._has_warned = True


def _drop_torn_tail(path: Path) -> None:
    """Cut what follows the last newline: no row is complete without it, and the next one must not glue to a part."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
