"""One process at a time, by a lock that the kernel takes back when its holder dies (floor 1, no torch)."""

import errno
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
