"""Files and directories that appear whole or not at all; locks (floor 1, no torch). Checkpoints have their `fsio`."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def atomic_write(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replace `path` by `text`: a reader sees the old or the new content, never a part.

    Durable, the same holds for the machine after a power loss. A file has one writer: what a kill leaves in
    `<path>.tmp` the next write takes; one that fails leaves nothing. Raises `OSError`.
    """
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    os.replace(partial, path)
    if is_durable:
        sync(path.parent)


def publish(staging: Path, directory: Path) -> bool:
    """Give a finished directory its name, once all in it would survive a power loss; False if another was first.

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
"""What some network file systems answer."""


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock file `path`, made if absent; False where the file system has no locks.

    `on_wait` is called again and again while another process holds it. Raises `OSError` when it cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while (is_locked := try_lock(file.fileno())) is None:
            on_wait()
            time.sleep(POLL_S)
        yield is_locked


def try_lock(descriptor: int) -> bool | None:
    """Take the lock on an open file or directory: None while another holds it, False where the file system has none.

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
    """Bytes of a file, or of all files below a directory; what vanishes meanwhile counts nothing."""
    files = [path] if not path.is_dir() else [Path(d) / name for d, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += os.lstat(file).st_size
    return total
