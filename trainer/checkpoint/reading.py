"""Reads a checkpoint while its run continues, through hard links that rotation does not touch.

Imports no torch.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.layout import IN_USE, READING_PREFIX, CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST, ManifestError, parse_manifest
from trainer.errors import CannotWriteError
from trainer.runtime.files import try_lock


@contextmanager
def pinned(info: CheckpointInfo, *parts: str) -> Iterator[Path | None]:
    """Yield a directory of links to the checkpoint's manifest and `parts` (files, directories).

    Yields None if the checkpoint was already deleted or replaced. The linked files stay complete
    even if the checkpoint is deleted. On a file system without hard links, this yields the
    checkpoint itself, whose files may disappear. The links are removed at the end. If the reader is
    killed, the next start or save of the run removes them. Raises `CannotWriteError`.
    """
    directory = info.path.with_name(f"{READING_PREFIX}{info.path.name}.{secrets.token_hex(4)}")
    try:
        directory.mkdir()
    except OSError as error:
        fix = "Fix: make the run directory writable, because readers link checkpoints there"
        raise CannotWriteError(f"cannot create a directory: {error}.\n{fix}") from error
    # The file is locked before it gets the name by which others find it.
    with open(directory / f"{IN_USE}.tmp", "xb") as lock:
        try:
            try_lock(lock.fileno())
            os.rename(lock.name, directory / IN_USE)
            # The path ends like the checkpoint's, because an evaluation finds a server's model by it.
            source = directory.joinpath(*info.path.resolve().parts[1:])
            # The manifest is linked last: it proves that all files are from one checkpoint.
            for file in (*_files(info.path, parts), info.path / MANIFEST):
                target = source / file.relative_to(info.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file, target)
                except FileNotFoundError:
                    pass  # The checkpoint has just been deleted, so the manifest is missing too.
                except OSError:
                    source = info.path
                    break
            yield source if _is_of(source, info) else None
        finally:
            shutil.rmtree(directory, ignore_errors=True)


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
