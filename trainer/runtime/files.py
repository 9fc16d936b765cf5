"""Files and directories that appear whole or not at all; locks. Checkpoints
have their `fsio`.
"""

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
"""More than any manifest, configuration or pointer has."""


def regular_opener(flags: int, *, follow_links: bool = True) -> Callable[[str, int], int]:
    """An `opener` for `open` that refuses all but regular files, at once: a FIFO without a writer
    would block.

    What it opens raises `OSError` for directories, FIFOs, devices and sockets, and for links unless
    they are followed.
    """
    extra = flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)

    def opener(path: str, mode_flags: int) -> int:
        descriptor = os.open(path, mode_flags | extra, 0o644)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))

    return opener


def open_regular(
    path: Path, *, limit_bytes: int | None = None, follow_links: bool = True
) -> BinaryIO:
    """A regular file of at most `limit_bytes`, open for reading. Raises `OSError` for anything
    else.
    """
    file = open(path, "rb", opener=regular_opener(0, follow_links=follow_links))  # noqa: SIM115  the caller closes it
    size_bytes = os.fstat(file.fileno()).st_size
    if limit_bytes is not None and size_bytes > limit_bytes:
        file.close()
        raise OSError(
            errno.EFBIG, f"has {size_bytes} bytes; at most {limit_bytes} are read", str(path)
        )
    return file


def read_regular(
    path: Path, *, limit_bytes: int = SMALL_FILE_BYTES, follow_links: bool = True
) -> bytes:
    """The content of a small regular file. Raises `OSError` for anything else, without waiting
    for it.
    """
    with open_regular(path, limit_bytes=limit_bytes, follow_links=follow_links) as file:
        return file.read(limit_bytes)


def atomic_write(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replace `path` by `text`: a reader sees the old or the new content, never a part.

    Durable, the same holds for the machine after a power loss. A file has one writer: what a kill
    leaves in `<path>.tmp` the next write removes; one that fails leaves nothing. A link of that
    name is removed, never followed. Raises `OSError`.
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
    """Give a finished directory its name, once all in it would survive a power loss; False if
    another was first.

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
    """Make the content of a file, or the names in a directory, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


POLL_S = 0.2
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of network file systems without locks."""


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock file `path`, made if absent; False where the file system has no locks.

    `on_wait` is called again and again while another process holds it. Raises `OSError` when it
    cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        while (is_locked := try_lock(file.fileno())) is None:
            on_wait()
            time.sleep(POLL_S)
        yield is_locked


def try_lock(descriptor: int) -> bool | None:
    """Take the lock on an open file or directory: None while another holds it, False where the file
    system has none.

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
    """Bytes of a file, or of all files below a directory; what vanishes meanwhile counts nothing.

    No link is followed, not even `path` itself.
    """
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(directory) / name for directory, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += os.lstat(file).st_size
    return total
