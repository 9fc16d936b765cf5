"""Files of prepared samples that a process maps, and what tells that one was written to since.

A mapping keeps the file it was made of: a file that is renamed, replaced or deleted does no harm.
Only writing into the file itself changes what the mapping shows, and cutting it short kills the
process that reads beyond its new end.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from trainer.errors import ResumableError

CHECKSUMS = "SHA256SUMS"
"""Lists every other file of a prepared directory, in the format of `sha256sum`."""
HASHED_BYTES = 1 << 24


class MappedFile:
    """One file of a prepared directory, open as long as this object lives."""

    def __init__(self, path: Path, *, sha256: str) -> None:
        """`sha256` is the digest that the file had when it was prepared. Raises `OSError`."""
        self.path, self._sha256 = path, sha256
        self._file = path.open("rb")
        self._state = self._size_and_time()

    def array(self, dtype: np.dtype) -> np.ndarray:
        """Map the file, read-only."""
        mapped: np.ndarray = np.memmap(self._file, dtype, "r")
        return mapped

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if the content is no longer what was prepared.

        It takes about a microsecond: every write to a file changes its modification time before its
        content. A file whose time alone has changed, as `touch` does, is hashed.
        """
        now = self._size_and_time()
        if now == self._state:
            return
        if now[0] != self._state[0] or self._digest() != self._sha256:
            raise ResumableError(
                f"prepared tokens changed while the run trained on them: {self.path} had "
                f"{self._state[0]:,} bytes, now it has "
                f"{now[0]:,}{' other ones' if now[0] == self._state[0] else ''}.\nFix: find what "
                f"writes to data.cache_dir, and start again with the same command: it prepares the "
                f"tokens again and continues from the last checkpoint"
            )
        self._state = now

    def _size_and_time(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns

    def _digest(self) -> str:
        """Read at positions: forked processes share the descriptor's own."""
        digest, position = hashlib.sha256(), 0
        while piece := os.pread(self._file.fileno(), HASHED_BYTES, position):
            digest.update(piece)
            position += len(piece)
        return digest.hexdigest()


def read_checksums(directory: Path) -> dict[str, str]:
    """sha256 by file name of a prepared directory. Raises `OSError`, `UnicodeDecodeError`."""
    lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
