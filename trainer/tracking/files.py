"""Small file operations that survive a kill: atomic replacement, repair of a torn last line, appending whole lines."""

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import CannotWriteError

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
CLOSE_TIMEOUT_S = 10.0


def atomic_write(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader sees the old or the new content, never a part."""
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def drop_torn_tail(path: Path) -> None:
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


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset in bytes, JSON object) of every whole line; torn and foreign lines are passed over."""
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            if isinstance(content, dict):
                yield offset, content
            offset += len(line)


class AppendFile:
    """JSON objects as lines, each by one `write` on an O_APPEND descriptor: a kill of the process loses none.

    A thread of its own makes them survive the machine as well, every `SYNC_INTERVAL_S` and when asked: a slow disk
    delays nobody. Raises `CannotWriteError` when the file cannot be opened. A line that cannot be written later (disk
    full) is lost with one warning: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_warned = self._is_closing = self._is_dirty = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._sync, name=f"sync-{path.name}", daemon=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            drop_torn_tail(path)
        except OSError as error:
            raise CannotWriteError(f"cannot open {path}: {error}; free space or choose another directory") from error

    def append(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            num_written = os.write(self._descriptor, line)
            if num_written < len(line):
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
