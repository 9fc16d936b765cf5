"""A lock that allows one run per directory.

A killed run does not leave the lock behind, and a run that lost the lock cannot keep using it.
"""

import errno
import json
import logging
import os
import secrets
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from trainer.checkpoint import layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.files import open_regular, regular_opener, try_lock
from trainer.runtime.heartbeat import LOCK
from trainer.runtime.processes import born_at

POLL_S = 0.1
MAX_RECORD_BYTES = 2**16

logger = logging.getLogger(__name__)


class RunLock:
    """Exclusive use of a run directory, held by rank 0 while it may write checkpoints.

    The lock is an exclusive `flock` on `.train.lock`: the kernel releases it when the process dies,
    and a stopped process keeps it. With `needs_flock=False`, a file system without locks is
    accepted; there, a later run takes over the directory.

    The file records the holder and a nonce. A run that takes over replaces the nonce. If the
    earlier run was only stopped (SIGSTOP), its `is_held` then returns False, so it no longer
    publishes. The file is never deleted, because another run could be waiting on the deleted file.
    A clean release empties it.

    Forked children release the lock at once, because a loader worker may outlive a killed trainer.
    """

    def __init__(self, run_dir: Path, *, needs_flock: bool = True) -> None:
        self._path = run_dir / LOCK
        self._needs_flock = needs_flock
        self._record = {
            "nonce": secrets.token_hex(16),
            "pid": os.getpid(),
            "born": born_at(os.getpid()),
            "host": socket.gethostname(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._descriptor: int | None = None

    def acquire(self, *, timeout_s: float = 20.0) -> None:
        """Take the lock. Waits at most `timeout_s`, because ranks of a killed run may linger.

        Raises `ConfigError` if another run still holds the lock (the message names that run) or if
        the file system has no locks, and `CannotWriteError` if the lock file cannot be written.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._try_acquire():
                if time.monotonic() >= deadline_s:
                    raise ConfigError(
                        f"'{self._path.parent}' is in use by another run ({self._holder()}).\n"
                        f"Fix: wait for that run or stop it, or train in a different directory "
                        f"(trainer.default_local_dir or trainer.experiment_name)"
                    )
                time.sleep(POLL_S)
        except OSError as error:
            raise CannotWriteError(
                f"cannot lock {self._path}: {error.strerror}.\n"
                f"Fix: make the directory writable, or choose a different trainer.default_local_dir"
            ) from error

    def is_held(self) -> bool:
        """Return True if the lock file is still the file that this process locked, with its nonce.

        Returns False if the file cannot be read.
        """
        if self._descriptor is None:
            return False
        try:
            found, content = self._look()
        except OSError as error:
            logger.warning("cannot check whether this run still holds %s: %s", self._path, error)
            return False
        is_same_file = found is not None and os.path.samestat(found, os.fstat(self._descriptor))
        return is_same_file and str(self._record["nonce"]).encode() in content

    def require(self) -> None:
        """Raise `CannotWriteError` unless this run holds its directory.

        If only the lock file was removed, it is created again.
        """
        if self.is_held() or self._make_again():
            return
        raise CannotWriteError(
            f"{self._path.parent} was deleted, or another run has taken it over ({self._holder()}).\n"
            f"Fix: let only one run use the directory, then run the same command to continue"
        )

    def release(self) -> None:
        """Empty the file and close it. If another run has taken over, leave its file unchanged."""
        if self._descriptor is not None and self.is_held():
            try:
                os.ftruncate(self._descriptor, 0)
            except OSError as error:
                logger.warning(
                    "cannot empty %s, so the next run may have to wait: %s", self._path, error
                )
        self._close()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_acquire(self) -> bool:
        """Try once to take the lock. Return False if another run holds it or takes it at the same time."""
        is_locked = try_lock(self._open(os.O_CREAT))
        if is_locked is None:
            return False
        if not is_locked:
            self._accept_no_locks()
        self._write_record()
        # since it was opened, the file may have been replaced, or taken over without a lock
        return self.is_held()

    def _accept_no_locks(self) -> None:
        """Warn that the file system has no locks. Raises `ConfigError` if a lock is required."""
        if self._needs_flock:
            raise ConfigError(
                f"'{self._path.parent}' is on a file system without locks (flock), so two runs "
                "could write there at once.\n"
                "Fix: choose a different trainer.default_local_dir, mount the file system with locks "
                "(NFS: no `nolock`; Lustre: `flock`), or set trainer.checkpoint.require_lock=false"
            )
        logger.warning("%s has no locks (flock): never start a second run there", self._path.parent)
        if self._look()[1]:
            logger.warning(
                "taking over from another run (%s); make sure that it has ended", self._holder()
            )

    def _make_again(self) -> bool:
        """Recreate a removed lock file. Return True if this run then holds the lock.

        A file that already exists at the path belongs to another run, which started in the meantime.
        """
        try:
            if try_lock(self._open(os.O_CREAT | os.O_EXCL)) is None:
                return False
            self._write_record()
        except OSError:
            return False
        logger.warning("%s was removed during training; this run created it again", self._path)
        return self.is_held()

    def _open(self, flags: int) -> int:
        self._close()
        opener = regular_opener(os.O_RDWR | flags, follow_links=False)
        self._descriptor = opener(str(self._path), 0)
        _open_locks.add(self)
        return self._descriptor

    def _close(self) -> None:
        """Close the file without changing it. This releases the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _open_locks.discard(self)

    def _write_record(self) -> None:
        assert self._descriptor is not None
        data = json.dumps(self._record).encode()
        os.pwrite(self._descriptor, data, 0)
        # last, because an empty file means that no run holds the lock
        os.ftruncate(self._descriptor, len(data))
        os.fsync(self._descriptor)  # from now on, NFS shows the record to other machines

    def _look(self) -> tuple[os.stat_result | None, bytes]:
        """Return the state and content of the file at the path; (None, b"") if it is missing.

        The file is reopened each time, because NFS shows writes by other machines only on open.
        """
        try:
            with open_regular(self._path, follow_links=False) as file:
                return os.fstat(file.fileno()), file.read(MAX_RECORD_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None, b""

    def _holder(self) -> str:
        try:
            return "pid {pid} on {host}, started {started}".format(**json.loads(self._look()[1]))
        except (ValueError, KeyError, TypeError):
            return "unknown pid"


def is_given_back(run_dir: Path) -> bool:
    """Return True if the lock file is missing or empty, as after a clean release.

    Writes nothing.
    """
    try:
        return (run_dir / LOCK).stat().st_size == 0
    except FileNotFoundError:
        return True


def has_ended_in_order(run_dir: Path, last: CheckpointInfo) -> bool:
    """Return True if the run ended cleanly after its checkpoint `last`, with nothing left to do.

    That is the case if the pointer names `last`, no temporary directories remain, and the lock has
    been released.
    """
    is_pointed_to = last.published and layout.read_pointer(run_dir).step == last.step
    return is_pointed_to and not layout.leftovers(run_dir) and is_given_back(run_dir)


_open_locks: set[RunLock] = set()


def _let_go_in_child() -> None:
    """Close descriptors inherited by `fork`; the parent keeps its lock."""
    for lock in list(_open_locks):
        lock._close()


os.register_at_fork(after_in_child=_let_go_in_child)
