"""Small file operations that survive a kill: atomic replacement and the repair of a torn last line."""

import os
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader sees the old or the new content, never a part."""
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def drop_torn_tail(path: Path) -> None:
    """Cut what follows the last newline: no row is complete without it, and the next one must not glue to a part."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
