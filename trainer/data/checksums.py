"""Whether the files of a directory are still those that were written, by their sha256 in the format of `sha256sum`."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "SHA256SUMS"


def write_checksums(directory: Path) -> None:
    """List every file of the directory; `sha256sum -c SHA256SUMS` checks them too."""
    names = sorted(path.name for path in directory.iterdir())
    lines = [f"{digest}  {name}\n" for name, digest in _digests(directory, names).items()]
    (directory / CHECKSUMS).write_text("".join(lines))


def find_damage(directory: Path) -> str | None:
    """What is wrong with the files: one that is missing, left over or changed; None when nothing is."""
    try:
        lines = (directory / CHECKSUMS).read_text().splitlines()
        names = sorted(path.name for path in directory.iterdir() if path.name != CHECKSUMS and path.name[0] != ".")
        found = [f"{digest}  {name}" for name, digest in _digests(directory, names).items()]
    except (OSError, UnicodeDecodeError) as error:
        return f"{CHECKSUMS} or a file it lists cannot be read: {error}"
    changed = {line.partition("  ")[2] for line in set(lines) ^ set(found)}
    return f"not as listed in {CHECKSUMS}: {', '.join(sorted(changed))}" if changed else None


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(max_workers=min(len(names) or 1, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
