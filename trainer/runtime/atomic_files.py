"""Files and directories that appear whole or not at all (floor 1, no torch). Those of checkpoints are `fsio`'s."""

import os
from pathlib import Path


def atomic_write(path: Path, text: str, *, partial: Path | None = None, is_durable: bool = True) -> None:
    """Replace `path` by `text`: a reader sees the old or the new content, never a part.

    Durable, the same holds for the machine after a power loss. `partial` is where the new content is written first,
    `<path>.tmp` for a file with one writer: what a kill leaves there the next write takes. Raises `OSError`.
    """
    partial = partial or path.with_name(f"{path.name}.tmp")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
    os.replace(partial, path)
    if is_durable:
        sync(path.parent)


def publish(staging: Path, directory: Path) -> bool:
    """Give a finished directory its name, once all in it would survive a power loss; False if another was first.

    Raises `OSError`.
    """
    for parent, _, names in os.walk(staging, topdown=False):
        for name in (*names, "."):
            sync(Path(parent, name))
    try:
        staging.rename(directory)
    except OSError:
        if directory.is_dir():
            return False
        raise
    sync(directory.parent)
    return True


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
