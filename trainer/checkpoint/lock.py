"""One run per directory: a lock that a killed run cannot leave behind."""

import fcntl
import json
import logging
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.config import ConfigError
from trainer.protocols import CannotWriteError

LOCK = ".train.lock"
POLL_S = 0.1

logger = logging.getLogger(__name__)


class RunLock:
    """Exclusive `flock` on `.train.lock`, held by rank 0 as long as it may write checkpoints.

    The kernel releases it when the process dies, however it dies. The file itself is never deleted: a run waiting on
    a deleted one would hold nothing. It says who holds it, for the message. Forked children let go of it at once, so
    that a loader worker which outlives a killed trainer does not keep it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._descriptor: int | None = None

    def acquire(self, *, timeout_s: float = 20.0) -> None:
        """Wait at most `timeout_s`: the ranks of a run just killed may live a moment longer.

        Raises `ConfigError` naming the holder, `CannotWriteError` if the directory cannot be written.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try_acquire():
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"'{self._path.parent}' is in use by another run ({self._holder()}): wait for it or stop it, or "
                    "train into another directory (trainer.default_local_dir or trainer.experiment_name)"
                )
            time.sleep(POLL_S)

    def is_held(self) -> bool:
        """Whether the lock file is still the one this process locked; not if someone removed or replaced it."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _open_locks.discard(self)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _try_acquire(self) -> bool:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise self._cannot_write(error) from error
        _open_locks.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            logger.warning(
                "%s: this file system has no locks (%s): let no second run use it", self._path, error.strerror
            )
        if not self.is_held():
            self.release()
            return False
        self._write_holder(self._descriptor)
        return True

    def _write_holder(self, descriptor: int) -> None:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except OSError as error:
            self.release()
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> CannotWriteError:
        return CannotWriteError(error.errno, f"cannot lock the run directory: {error.strerror}", str(self._path))

    def _holder(self) -> str:
        try:
            holder = json.loads(self._path.read_bytes())
            return f"pid {holder['pid']} on {holder['host']}, started {holder['started']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "which did not say its pid"


_open_locks: set[RunLock] = set()


def _release_in_child() -> None:
    """Closing a descriptor inherited by `fork` leaves the parent's lock as it is."""
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
