"""Read a checkpoint while its run continues, through hard links that rotation does not touch. No
torch.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.layout import IN_USE, READING_PREFIX, CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST, ManifestError, parse_manifest
from trainer.runtime.files import try_lock


@contextmanager
def pinned(info: CheckpointInfo, *parts: str) -> Iterator[Path | None]:
    """Give a directory like the checkpoint's, with these `parts` (files, directories) and its
    manifest; None if the checkpoint was deleted or replaced before.

    It stays whole whatever happens to the checkpoint. On a file system without hard links it is the
    checkpoint itself, whose files may disappear. The links are removed at the end; those of a
    killed reader by the next start or save of the run.
    """
    directory = info.path.with_name(f"{READING_PREFIX}{info.path.name}.{secrets.token_hex(4)}")
    directory.mkdir()
    lock = None
    try:
        lock = _lock(directory)
        # The path ends like the checkpoint's: by it an evaluation finds the model of a server.
        source = directory.joinpath(*info.path.resolve().parts[1:])
        # The manifest is last: it tells whether all files are of one checkpoint.
        for file in (*_files(info.path, parts), info.path / MANIFEST):
            target = source / file.relative_to(info.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except FileNotFoundError:
                pass  # The checkpoint is deleted meanwhile: the manifest is missing too.
            except OSError:
                source = info.path
                break
        yield source if _is_of(source, info) else None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int:
    """Mark the directory as in use while this process lives. The mark is locked before it gets its
    name.
    """
    partial = directory / f"{IN_USE}.tmp"
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try_lock(descriptor)
        partial.rename(directory / IN_USE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _files(checkpoint: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    for part in parts:
        path = checkpoint / part
        if path.is_file():
            yield path
        for directory, _, names in os.walk(path):
            yield from (Path(directory, name) for name in names)


def _is_of(directory: Path, info: CheckpointInfo) -> bool:
    try:
        found = parse_manifest((directory / MANIFEST).read_bytes())
    except (OSError, ManifestError):
        return False
    return found.nonce == info.nonce
