"""Any storage that fsspec reaches, as files below one URL (floor 3, no torch)."""

import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """The storage refused or did not answer; the message says what was tried, and why it failed.

    `is_refusal`: no permission, or no such bucket or repository: to try again will not help.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class SilentError(StorageError):
    """It does not answer, and does not fail."""


def require_usable(url: str) -> None:
    """The URL is one and its packages are there; nothing is imported or connected. Raises
    `ConfigError`.
    """
    protocol, mark, path = url.partition("://")
    if not mark or not path.strip("/"):
        raise ConfigError(
            f"'{KEY}={url}' is no URL: write s3://bucket/path, gs://…, hf://org/repo/path or "
            f"file:///path"
        )
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            f"'{KEY}={url}': nobody knows {protocol}://; s3, gs, hf, file and what else fsspec has "
            f"work"
        )
    known = known_implementations.get(protocol, {"class": "fsspec"})
    if find_spec(known["class"].partition(".")[0]) is None:
        raise ConfigError(
            f"'{KEY}={url}': {known.get('err')} (s3fs and gcsfs: pip install 'fsdp-sft[mirror]')"
        )


def is_repository(url: str) -> bool:
    """Of the Hub: it has commits, which its buckets have not."""
    return url.startswith("hf://") and not url.startswith("hf://buckets/")


class _Answers(Callback):
    """Of a file under way, each part that has arrived."""

    def __init__(self, storage: "Storage") -> None:
        super().__init__()
        self._storage = storage

    def call(self, hook_name: str | None = None, **kwargs: object) -> None:
        self._storage.answered_at = time.monotonic()


def count_files(url: str, *, within_s: float) -> int:
    """Raises `StorageError`, also for a storage that does not answer in time, and `ConfigError`."""
    answer = begun(lambda: len(Storage(url).sizes()))
    if not wait([answer], within_s).done:
        raise StorageError(f"{url} has not answered within {within_s:.0f} s")
    return answer.result()


class Storage:
    """Names are relative to `url`, with forward slashes. Every failure is a `StorageError`; a file
    that is not there is none where it is asked for or removed. May be used from several threads.
    `answered_at`: on the monotonic clock.
    """

    def __init__(self, url: str, file_system: AbstractFileSystem | None = None) -> None:
        """`file_system`: in place of the one that the URL names. Raises `ConfigError`."""
        require_usable(url)
        self.url, self._given = url.rstrip("/"), file_system
        self.answered_at, self._is_given_up = time.monotonic(), False
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        if url.startswith(("file://", "local://")):
            options["auto_mkdir"] = True
        with self._told("open"):
            found, self._root = fsspec.url_to_fs(self.url, **options)
            self._fs = file_system or found

    def given_up(self) -> "Storage":
        """Another in its place; what still waits for an answer here does no more once it has it."""
        self._is_given_up = True
        return type(self)(self.url, self._given)

    def as_one(self, title: str) -> AbstractContextManager[None]:
        """Where a storage can, what the block writes and removes shows at its end, together and
        under this title.
        """
        return nullcontext()

    def sizes(self) -> dict[str, int]:
        """Every file there, in bytes, as the storage says now."""
        with self._told("list"):
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
        with self._told("read", name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._told("write", name):
            self._fs.pipe_file(self._path(name), data)
            self._settle(name)

    def put(self, local: Path, name: str) -> None:
        with self._told("write", name):
            self._fs.put_file(str(local), self._path(name), callback=_Answers(self))
            self._settle(name)

    def fetch(self, name: str, file: HashingFile) -> None:
        """Write the content to `file`; errors of the disk stay what they are."""
        with self._told("read", name):
            reader = self._fs.open(self._path(name), "rb")
        with reader:
            while True:
                with self._told("read", name):
                    chunk = reader.read(COPY_CHUNK_BYTES)
                if not chunk:
                    return
                file.write(chunk)

    def remove(self, name: str, *, is_tree: bool = False) -> None:
        with self._told("remove", name):
            try:
                self._fs.rm(self._path(name), recursive=True) if is_tree else self._fs.rm_file(
                    self._path(name)
                )
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _settle(self, name: str) -> None:
        """What object storages promise: what was written survives."""
        if isinstance(self._fs, LocalFileSystem):
            sync(Path(self._path(name)))
            sync(Path(self._path(name)).parent)

    @contextmanager
    def _told(self, verb: str, name: str = "") -> Iterator[None]:
        """Libraries raise what they like; a local file that cannot be read is told alike."""
        if self._is_given_up:
            raise StorageError(f"{self.url} was given up")
        try:
            yield
            self.answered_at = time.monotonic()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            # as the client of the Hub says it
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_refusal = isinstance(error, PermissionError | FileNotFoundError) or status in (
                401,
                403,
                404,
            )
            raise StorageError(
                f"cannot {verb} {self.url}/{name}: {reason}", is_refusal=is_refusal
            ) from error
