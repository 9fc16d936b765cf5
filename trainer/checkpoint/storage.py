"""Access to any storage that fsspec supports, as files under one URL."""

import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from trainer.checkpoint.fsio import COPY_CHUNK_BYTES, HashingFile
from trainer.config import ConfigError
from trainer.runtime.files import sync
from trainer.runtime.processes import begun

KEY = "trainer.checkpoint.mirror"


class StorageError(Exception):
    """The storage refused a request or did not answer. The message names the operation and the
    cause.

    `is_refusal`: True if a retry will not help, for example because permission is denied or
    the bucket does not exist.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class SilentError(StorageError):
    """The storage did not respond within the time limit."""


def require_usable(url: str) -> None:
    """Raise `ConfigError` for a wrong URL or a missing package. Imports and connects to nothing."""
    protocol, mark, path = url.partition("://")
    problem = ""
    if not mark or not path.strip("/"):
        problem = "is not a URL"
    elif protocol in ("file", "local") and not path.startswith(("/", "~")):
        problem = "depends on the current directory"
    elif protocol not in fsspec.available_protocols():
        problem = f"cannot be reached: fsspec does not know {protocol}://"
    elif protocol == "hf" and not path.startswith("buckets/"):
        problem = "is a Hub repository, where each file would be a commit, and commits are limited"
    if problem:
        raise ConfigError(
            f"{KEY}={url} {problem}.\nFix: use s3://bucket/path, gs://bucket/path, "
            f"hf://buckets/org/name/path, file:///path or any other URL that fsspec supports"
        )
    known = known_implementations.get(protocol, {"class": "fsspec"})
    if find_spec(known["class"].partition(".")[0]) is None:
        raise ConfigError(
            f"{KEY}={url}: {known.get('err')}.\n"
            f"Fix: install the missing package (pip install 'fsdp-sft[mirror]' for s3fs and gcsfs)"
        )


def count_files(url: str, *, within_s: float) -> int:
    """Return the number of files under a URL. Raises `ConfigError`, `StorageError`."""
    listed = begun(lambda: Storage(url).sizes())
    if not wait([listed], timeout=within_s).done:
        raise SilentError(f"{url} did not answer within {within_s:.0f} s")
    return len(listed.result())


class Storage:
    """The files below `url`, by name. Methods raise `StorageError`. Threads may share an object."""

    def __init__(self, url: str, file_system: AbstractFileSystem | None = None) -> None:
        """`file_system` replaces the one that fsspec finds. Raises `ConfigError`."""
        require_usable(url)
        self.url = url.rstrip("/")
        self.answered_at = time.monotonic()
        self._replacement = file_system

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        """The file system, and the path of the URL in it. The first operation opens them, because
        ftp, sftp and hdfs connect here, and a later operation must be able to try again.
        """
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        if self.url.startswith(("file://", "local://")):
            options["auto_mkdir"] = True
        found, root = fsspec.url_to_fs(self.url, **options)
        return self._replacement or found, root

    @property
    def _fs(self) -> AbstractFileSystem:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def is_at(self, path: Path) -> bool:
        """Return True if the files are in the directory `path` of this machine."""
        with self._translated("open"):
            is_local = isinstance(self._fs, LocalFileSystem)
            return is_local and Path(self._root).resolve() == path.resolve()

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file by name. Nothing is cached."""
        with self._translated("list"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {
                name.removeprefix(self._root).lstrip("/"): int(info["size"])
                for name, info in found.items()
            }

    def read(self, name: str) -> bytes | None:
        with self._translated("read", name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._translated("write", name):
            self._fs.pipe_file(self._path(name), data)
            self._settle(name)

    def put(self, local: Path, name: str) -> None:
        with self._translated("write", name):
            progress = Callback(hooks={"part": self._note_answer})
            self._fs.put_file(str(local), self._path(name), callback=progress)
            self._settle(name)

    def fetch(self, name: str, file: HashingFile) -> None:
        """Write the content to `file`. Errors of the local disk remain `OSError`."""
        with self._translated("read", name):
            reader = self._fs.open(self._path(name), "rb")
        with reader:
            chunk = None
            while chunk != b"":
                with self._translated("read", name):
                    chunk = reader.read(COPY_CHUNK_BYTES)
                file.write(chunk)

    def remove_tree(self, name: str) -> None:
        """Remove everything below `name`."""
        with self._translated("remove", name):
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _settle(self, name: str) -> None:
        """Sync a file on a local disk. Object storage is durable once it accepts a file."""
        if isinstance(self._fs, LocalFileSystem):
            path = Path(self._path(name))
            sync(path)
            sync(path.parent)

    def _note_answer(self, *_: object) -> None:
        self.answered_at = time.monotonic()

    @contextmanager
    def _translated(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn every error into a `StorageError`."""
        try:
            yield
            self._note_answer()
        except Exception as error:
            kind = type(error).__name__
            # botocore's errors about missing or partial credentials have no common class
            is_refusal = isinstance(error, PermissionError | FileNotFoundError)
            is_refusal |= "Credentials" in kind
            reason = f"{kind}: {' '.join(str(error).split())}"
            raise StorageError(
                f"cannot {verb} {self.url}/{name}: {reason}", is_refusal=is_refusal
            ) from error
