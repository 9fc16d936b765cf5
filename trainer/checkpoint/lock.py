"""One run per directory: a lock that a killed run cannot leave behind and a fenced run cannot
use.
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

from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.files import open_regular, regular_opener, try_lock
from trainer.runtime.heartbeat import LOCK
from trainer.runtime.processes import born_at

POLL_S = 0.1
REPLACED = (errno.ENOENT, errno.ESTALE)
MAX_RECORD_BYTES = 2**16

logger = logging.getLogger(__name__)


class NoLocksError(ConfigError):
    """The file system has no locks, so two runs could write to one directory at once."""


class RunLock:
    """Exclusive use of a run directory, held by rank 0 as long as it may write checkpoints.

    `.train.lock` carries the record of the holder: who it is, for the message, and its nonce.
    Whoever takes over replaces the nonce, so a run that was stopped meanwhile sees in `is_held`
    that it may no longer publish. The file is never deleted, a clean release empties it: a run
    waiting on a deleted one would hold nothing.

    It is an exclusive `flock`: the kernel releases it when the process dies, however it dies, and a
    stopped process keeps it. Without `needs_flock` a file system that has none is accepted: the
    later run then holds the directory.

    Where only the lock file was removed, `keep` makes it again, unless another run came in between.
    The run directory is held open, so that a new directory of the same name is not taken for it.

    Forked children let go at once, so that a loader worker which outlives a killed trainer does not
    keep it.
    """

    def __init__(self, run_dir: Path, *, needs_flock: bool = True) -> None:
        self._path = run_dir / LOCK
        self._needs_flock = needs_flock
        self._record: dict[str, str | int | None] = {}
        self._descriptor: int | None = None
        self._directory: int | None = None

    def acquire(self, *, timeout_s: float = 20.0) -> None:
        """Wait at most `timeout_s`: the ranks of a run just killed may live a moment longer.

        Raises `ConfigError` naming the holder, `NoLocksError`, and `CannotWriteError` if the
        directory cannot be written.
        """
        deadline_s = time.monotonic() + timeout_s
        self._record = {
            "nonce": secrets.token_hex(16),
            "pid": os.getpid(),
            "born": born_at(os.getpid()),
            "host": socket.gethostname(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            self._close()
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._directory = os.open(self._path.parent, flags)
            if not self._try_acquire(deadline_s):
                logger.info("waiting up to %g s for the run %s", timeout_s, self._holder())
                while not self._try_acquire(deadline_s):
                    pass
        except (ConfigError, OSError) as error:
            self._close()
            if isinstance(error, ConfigError):
                raise
            raise CannotWriteError(
                error.errno,
                f"cannot lock the run directory: {error.strerror}; make it writable, or choose "
                f"another directory",
                str(self._path),
            ) from error

    def is_held(self) -> bool:
        """Return True while the lock file is still the one this process locked and carries its nonce; not
        if that is unknown.
        """
        try:
            return self._is_ours()
        except OSError as error:
            logger.warning("cannot tell whether this run still holds %s: %s", self._path, error)
            return False

    def require(self) -> None:
        """Raise `CannotWriteError` unless this run holds its directory.

        If only the lock file was removed, it is made again. Any file at the path is another run's:
        it came while there was none.
        """
        if self.is_held():
            return
        run_dir = self._path.parent
        if not self._is_same_directory():
            raise CannotWriteError(
                f"{run_dir} was deleted or renamed while this run was training in it"
            )
        if os.path.lexists(self._path):
            raise CannotWriteError(f"another run has taken over {run_dir} ({self._holder()})")
        try:
            descriptor = self._open(self._path, os.O_CREAT | os.O_EXCL)
            if try_lock(descriptor) is not None:
                self._write_record()
        except OSError as error:
            raise CannotWriteError(
                f"{self._path} was removed while this run was training, and cannot be made again: "
                f"{error}"
            ) from error
        if not self.is_held():
            raise CannotWriteError(f"another run has taken over {run_dir} ({self._holder()})")
        logger.warning("%s was removed during training: this run made it again", self._path)

    def release(self) -> None:
        """Give it back and empty the file, so that the next run need not wait; one taken over
        is left as it is.
        """
        if self._descriptor is not None and self.is_held():
            try:
                os.ftruncate(self._descriptor, 0)
            except OSError as error:
                logger.warning(
                    "cannot empty %s, the next run may have to wait: %s", self._path, error
                )
        self._close()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_acquire(self, deadline_s: float) -> bool:
        """False: another run holds it or came in between, try again. Raises `ConfigError` after
        the deadline.
        """
        descriptor = self._open(self._path, os.O_CREAT)
        is_locked = try_lock(descriptor)
        if is_locked is None:
            if (remaining_s := deadline_s - time.monotonic()) <= 0:
                raise ConfigError(
                    f"'{self._path.parent}' is in use by another run ({self._holder()}).\n"
                    f"Fix: wait for it or stop it, or train into another directory "
                    f"(trainer.default_local_dir or trainer.experiment_name)"
                )
            time.sleep(min(POLL_S, remaining_s))
            return False
        if not is_locked:
            self._accept_no_locks()
        self._write_record()
        return self._is_ours()

    def _accept_no_locks(self) -> None:
        """Raises `NoLocksError` if the lock is needed."""
        if self._needs_flock:
            raise NoLocksError(
                f"'{self._path.parent}' is on a file system without locks (flock): two runs could "
                "write there at once. Fix: choose another directory (trainer.default_local_dir), "
                "mount it with locks (NFS: no `nolock`; Lustre: `flock`), or accept it with "
                "trainer.checkpoint.require_lock=false"
            )
        logger.warning("%s has no locks (flock): never start a second run there", self._path.parent)
        if self._look()[1]:
            logger.warning("taking over from the run %s: has it ended?", self._holder())

    def _open(self, path: Path, flags: int) -> int:
        self._let_go()
        self._descriptor = regular_opener(os.O_RDWR | flags, follow_links=False)(str(path), 0)
        _open_locks.add(self)
        return self._descriptor

    def _close(self) -> None:
        """Close the file and the directory as they are, which ends the lock."""
        self._let_go()
        if self._directory is not None:
            os.close(self._directory)
        self._directory = None

    def _is_same_directory(self) -> bool:
        """Return True while the path still names the directory that was locked: an open directory keeps
        its number.
        """
        if self._directory is None:
            return False
        try:
            return os.path.samestat(os.stat(self._path.parent), os.fstat(self._directory))
        except OSError:
            return False

    def _write_record(self) -> None:
        assert self._descriptor is not None
        data = json.dumps(self._record).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))  # last: an empty file means that nobody holds it
        os.fsync(self._descriptor)  # NFS shows it to other machines from now on

    def _look(self) -> tuple[os.stat_result | None, bytes]:
        """The file at the path and its content, opened anew: NFS shows what other machines
        wrote only then.
        """
        try:
            with open_regular(self._path, follow_links=False) as file:
                return os.fstat(file.fileno()), file.read(MAX_RECORD_BYTES)
        except OSError as error:
            if error.errno not in REPLACED:
                raise
            return None, b""

    def _holder(self) -> str:
        try:
            return "pid {pid} on {host}, started {started}".format(**json.loads(self._look()[1]))
        except (ValueError, KeyError, TypeError):
            return "which did not say its pid"

    def _is_ours(self) -> bool:
        if self._descriptor is None:
            return False
        found, content = self._look()
        is_same_file = found is not None and os.path.samestat(found, os.fstat(self._descriptor))
        return is_same_file and str(self._record["nonce"]).encode() in content

    def _let_go(self) -> None:
        """Close the file as it is."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _open_locks.discard(self)


def is_given_back(run_dir: Path) -> bool:
    """Return True if no run has the lock or left it behind. Writes nothing."""
    try:
        return (run_dir / LOCK).stat().st_size == 0
    except FileNotFoundError:
        return True


_open_locks: set[RunLock] = set()


def _let_go_in_child() -> None:
    """Closing a descriptor inherited by `fork` leaves the parent's lock as it is."""
    for lock in list(_open_locks):
        lock._close()


os.register_at_fork(after_in_child=_let_go_in_child)
