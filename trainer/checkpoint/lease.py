"""Who reads a checkpoint holds off those who rotate: a lock that ends with its process, however that ends. No torch."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.runtime.file_lock import NO_FLOCK, try_lock

logger = logging.getLogger(__name__)


def _lease_file(checkpoint: Path) -> Path:
    """Beside the checkpoint and not in it: network file systems lock files that are open for writing, no directory."""
    return checkpoint.with_name(f".lease_{checkpoint.name}")


@contextmanager
def reading(checkpoint: Path) -> Iterator[bool]:
    """Rotation spares the checkpoint meanwhile; False where it is gone, or about to be.

    A file system without locks cannot hold anyone off: that is said, and the reader must see whether it is whole still.
    """
    path = _lease_file(checkpoint)
    with path.open("a+") as file:
        is_ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being deleted
            is_ours = False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            logger.warning("%s: this file system has no locks: rotation may delete the checkpoint meanwhile", path)
        yield is_ours and _is_current(file.fileno(), path) and checkpoint.is_dir()
    if not checkpoint.is_dir():
        path.unlink(missing_ok=True)


@contextmanager
def deleting(checkpoint: Path) -> Iterator[bool]:
    """Whether nobody reads it; who comes meanwhile finds it gone."""
    path = _lease_file(checkpoint)
    if not path.exists():
        yield True
        return
    with path.open("a+") as file:
        may_delete = try_lock(file.fileno()) is not None
        yield may_delete
        if may_delete:
            path.unlink(missing_ok=True)


def _is_current(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
