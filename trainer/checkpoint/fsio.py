"""All file operations of a save. No other module of this package writes files of a checkpoint.

Each operation is announced to an observer before it happens. With the observer, tests record
operations, enumerate the states that a crash can leave, and kill or delay the process or inject an
error at a chosen operation.

Unless its docstring states otherwise, a function returns only when its effect is durable. A failed
`fsync` is never repeated on the same descriptor: the kernel may have dropped the pages, and may
report success the second time. The error ends this save, and the next save writes new files.
"""

import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Self

from trainer.runtime.files import read_regular, regular_opener

COPY_CHUNK_BYTES = 4 << 20
VISIBILITY_POLL_S = 0.05


@dataclass(frozen=True)
class Operation:
    """An operation that is about to happen to `path`.

    kind: mkdir, create, write, fsync, close, rename (to `target`), unlink, rmdir, fsync_dir, or
    phase. A phase is a step of the protocol between ranks, named by `path.name`; it touches no
    file.
    """

    kind: str
    path: Path
    target: Path | None = None
    data: bytes | memoryview = b""


observer: Callable[[Operation], None] | None = None
"""Called in the thread of the operation. If it raises an error, the operation does not happen."""


def _announce(
    kind: str,
    path: Path,
    target: Path | None = None,
    data: bytes | memoryview = b"",
) -> None:
    if observer is not None:
        with _named(path):
            observer(Operation(kind, path, target, data))


def phase(name: str) -> None:
    """Announce a protocol step that is not a file operation."""
    _announce("phase", Path(name))


@dataclass(frozen=True)
class FileRecord:
    """A written file. `path` is relative to the checkpoint directory, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str


Share = tuple[int, int]
"""(index, count): one rank's share of the files, which is every `count`-th file starting at
`index`.
"""


class HashingFile:
    """A new file that counts and hashes the bytes written to it. `torch.save` accepts it as a file.

    The end of a `with` block syncs and closes the file, or closes it unsynced if the block raised
    an error. `fsync_tree` makes the directory entry durable. Raises `OSError` if the path exists or
    a write fails. `torch.save` hides such an error in a `RuntimeError`, but the end of the block
    raises the original error.
    """

    record: FileRecord
    """Set by `close`."""

    def __init__(self, path: Path, *, root: Path) -> None:
        self._path = path
        self._relative = path.relative_to(root).as_posix()
        _announce("create", path)
        self._file = open(path, "xb")  # noqa: SIM115  lives as long as this object
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        try:
            _announce("write", self._path, data=view)
            with _named(self._path):
                self._file.write(view)
        except OSError as error:
            self._error = error
            raise
        self._sha256.update(view)
        self._size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        with _named(self._path):
            self._file.flush()

    def close(self) -> None:
        """Flush, sync and close. Raises `OSError` if the size on disk is not the written size."""
        with _named(self._path):
            try:
                self._file.flush()
                _announce("fsync", self._path)
                os.fsync(self._file.fileno())
                _announce("close", self._path)
            finally:
                self._file.close()  # NFS reports a full disk on close
        found_bytes = os.stat(self._path).st_size
        if found_bytes != self._size_bytes:
            raise OSError(
                f"{self._path} has {found_bytes} bytes on disk after {self._size_bytes} were "
                f"written"
            )
        self.record = FileRecord(self._relative, self._size_bytes, self._sha256.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(OSError):
            self._file.close()
        if self._error is not None and isinstance(error, Exception):
            raise self._error from error


def make_dir(path: Path) -> None:
    """Create a directory that does not exist yet."""
    _announce("mkdir", path)
    os.mkdir(path)
    fsync_dir(path.parent)


def make_dirs(path: Path) -> None:
    """Create a directory and its missing parents, unless the directory exists."""
    if not path.is_dir():
        make_dirs(path.parent)
        try:
            make_dir(path)
        except FileExistsError:
            if not path.is_dir():
                raise


def write_file(path: Path, data: bytes, *, root: Path) -> FileRecord:
    """Write a new small file; its directory entry becomes durable with `fsync_tree`."""
    with HashingFile(path, root=root) as file:
        file.write(data)
    return file.record


def atomic_write(path: Path, data: bytes) -> None:
    """Create or replace a small file.

    Readers see either the old or the new content, even after a power loss.
    """
    temporary = temporary_path(path)
    try:
        write_file(temporary, data, root=path.parent)
        _announce("rename", temporary, path)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            unlink(temporary)
        raise
    fsync_dir(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a new name in the same directory: `.<name>.<nonce>.tmp`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def rename(source: Path, target: Path) -> None:
    """Rename within one directory. Raises `OSError` if `target` is a non-empty directory."""
    rename_unsynced(source, target)
    fsync_dir(target.parent)


def rename_unsynced(source: Path, target: Path) -> None:
    """Rename; durable only after `fsync_dir`."""
    _announce("rename", source, target)
    os.rename(source, target)


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory with all its contents. Not synced.

    Symbolic links are removed, never followed.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        unlink(path)
        return
    for name in list_dir(path):
        remove_tree(path / name)
    _announce("rmdir", path)
    os.rmdir(path)


def unlink(path: Path) -> None:
    """Remove one file. Not synced."""
    _announce("unlink", path)
    os.unlink(path)


def fsync_dir(path: Path) -> None:
    """Make the creations, renames and removals in one directory durable."""
    with _named(path):
        _announce("fsync_dir", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every directory entry below `path` durable, bottom-up."""
    for directory, _, _ in os.walk(path, topdown=False, onerror=_raise):
        fsync_dir(Path(directory))


def _raise(error: OSError) -> None:
    raise error


def list_dir(path: Path) -> list[str]:
    """Return the sorted names in a directory; [] if it does not exist."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def read_bytes(path: Path) -> bytes:
    """Return the content of a small regular file. Raises `OSError`, even for a symbolic link."""
    with _named(path):
        return read_regular(path, follow_links=False)


def sha256_of(path: Path) -> str:
    """Return the hex digest of a regular file. Raises `OSError`, even for a symbolic link."""
    opener = regular_opener(0, follow_links=False)
    with _named(path), open(path, "rb", buffering=0, opener=opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an error of `read`, `write` or `fsync`, which does not name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def free_bytes(path: Path) -> int:
    """Return the bytes free for this user on a directory's file system. Quotas are ignored."""
    return shutil.disk_usage(path).free


def await_files(root: Path, records: Iterable[FileRecord], *, deadline: float) -> None:
    """Wait until this machine sees the files of other machines at their full size.

    On a network file system they may appear late. `deadline`: a `time.monotonic()`. Raises
    `OSError` after it, naming the first file that is missing or has a different size.
    """
    for record in records:
        while (problem := size_problem(root, record)) is not None:
            if time.monotonic() >= deadline:
                raise OSError(f"{root}: a written file is not visible on this machine: {problem}")
            time.sleep(VISIBILITY_POLL_S)


def size_problem(root: Path, record: FileRecord) -> str | None:
    """Describe how a file differs from its record in kind or size; return None if it does not.

    The text starts with the path. A symbolic link, or a file below one, counts as a problem.
    """
    parents = PurePath(record.path).parents[:-1]  # without the root
    try:
        found = os.lstat(root / record.path)
        is_linked = any((root / parent).is_symlink() for parent in parents)
        if not stat.S_ISREG(found.st_mode) or is_linked:
            return f"{record.path} is not a file, or a symbolic link leads to it"
    except OSError as error:
        return f"{record.path}: {error.strerror or error}"
    if found.st_size == record.size_bytes:
        return None
    return f"{record.path} has {found.st_size} bytes, but {record.size_bytes} were written"


def require_dir(path: Path) -> None:
    """Raise `OSError` unless `path` is a directory and not a symbolic link."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise OSError(f"{path.name} is a symbolic link or not a directory")
