"""Writes files and directories atomically, and takes locks. Checkpoints use `checkpoint/fsio.py`."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SMALL_FILE_BYTES = 2**28
"""Size limit of small files, above the size of any manifest, configuration or pointer."""
POLL_S = 0.2
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of network file systems without locks."""


def regular_opener(
    flags: int, *, follow_links: bool = True, limit_bytes: int | None = None
) -> Callable[[str, int], int]:
    """Return an `opener` for `open` that accepts only regular files of at most `limit_bytes`. The
    opener never blocks, not even on a FIFO without a writer.

    It raises `OSError` for directories, FIFOs, devices and sockets, and for links unless they are
    followed.
    """
    extra = flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)

    def opener(path: str, mode_flags: int) -> int:
        descriptor = os.open(path, mode_flags | extra, 0o644)
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            error = OSError(errno.EINVAL, "is not a regular file", path)
        elif limit_bytes is not None and state.st_size > limit_bytes:
            text = f"has {state.st_size} bytes; at most {limit_bytes} are read"
            error = OSError(errno.EFBIG, text, path)
        else:
            return descriptor
        os.close(descriptor)
        raise error

    return opener


def open_regular(
    path: Path, *, limit_bytes: int | None = None, follow_links: bool = True
) -> BinaryIO:
    """Open a regular file of at most `limit_bytes` for reading. Raises `OSError` for anything
    else.
    """
    return open(
        path, "rb", opener=regular_opener(0, follow_links=follow_links, limit_bytes=limit_bytes)
    )


def read_regular(
    path: Path, *, limit_bytes: int = SMALL_FILE_BYTES, follow_links: bool = True
) -> bytes:
    """Return the content of a small regular file. Raises `OSError` at once for anything else."""
    with open_regular(path, limit_bytes=limit_bytes, follow_links=follow_links) as file:
        return file.read(limit_bytes)


def atomic_write(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replace the content of `path` by `text`. A reader sees the old or the new content, never a
    mixture.

    With `is_durable`, this holds even after a power loss. A file has one writer. A killed write may
    leave `<path>.tmp`, which the next write removes; a failed write leaves nothing. A link named
    `<path>.tmp` is removed, never followed. Raises `OSError`.
    """
    partial = path.with_name(f"{path.name}.tmp")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    if is_durable:
        sync(path.parent)


def publish(staging: Path, directory: Path) -> bool:
    """Rename a finished directory after syncing everything in it. Return False if another process
    published it first.

    Raises `OSError`.
    """
    for parent, _, names in os.walk(staging, topdown=False):
        for name in (*names, "."):
            sync(Path(parent, name))
    try:
        staging.rename(directory)
    except OSError:
        if directory.is_dir():
            return False
        raise
    sync(directory.parent)
    return True


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk, so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock file `path`, created if missing. Yields False if the file system has no locks.

    Calls `on_wait` repeatedly while another process holds the lock. Raises `OSError` if the file
    cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        while (is_locked := try_lock(file.fileno())) is None:
            on_wait()
            time.sleep(POLL_S)
        yield is_locked


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or directory. Return None while another process holds the lock, False if
    the file system has no locks.

    Raises `OSError` for anything else.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return False
    return True


def tree_bytes(path: Path) -> int:
    """Return the size of a file, or of all files under a directory, without following links.

    The size is in bytes. Files that disappear during the scan are not counted.
    """
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(directory, name) for directory, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += os.lstat(file).st_size
    return total
