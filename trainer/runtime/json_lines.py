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
from typing import Any

from trainer.errors import CannotWriteError

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0


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
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


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
    """(offset in bytes, JSON object) of the whole lines of a file, each time those that were added since the last.

    Torn and foreign lines are passed over, as are those that are not wanted; a last line without its end waits for it.
    None without the file.
    """

    def __init__(self, path: Path, *, is_wanted: Callable[[bytes], bool] = bool) -> None:
        self._path, self._is_wanted = path, is_wanted
        self._offset = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, self._offset = self._offset, self._offset + len(line)
                if not self._is_wanted(line):
                    continue
                try:
                    content = json.loads(line)
                except ValueError:
                    continue
                if isinstance(content, dict):
                    yield start, content


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
