"""Inspects run directories: their contents, damage, and old checkpoints."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import choice, fsio, layout
from trainer.checkpoint.layout import (
    ASIDE_PREFIXES,
    READING_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
)
from trainer.checkpoint.lock import LOCK
from trainer.checkpoint.manifest import MANIFEST, ManifestError, parse_manifest, verify_files
from trainer.config import ConfigError
from trainer.runtime.files import tree_bytes
from trainer.runtime.json_lines import read_object
from trainer.runtime.text import readable
from trainer.tools.mirror import STATE

RUNS_ROOT = Path("checkpoints")
MAX_HASH_THREADS = 8
LEFTOVERS = (STAGING_PREFIX, TRASH_PREFIX, READING_PREFIX, *ASIDE_PREFIXES)
"""Prefixes of unfinished saves and deletions, links of readers (evaluate, mirror), and checkpoints
that were set aside.
"""

logger = logging.getLogger(__name__)


def require_dir(path: Path) -> None:
    """Raise `ConfigError` unless the path is a directory."""
    if not path.is_dir():
        raise ConfigError(
            f"no directory '{path}'.\nFix: pass a run directory, "
            f"{RUNS_ROOT}/<project_name>/<experiment_name>"
        )


def require_run(path: Path) -> None:
    """Raise `ConfigError` unless the path is a run directory."""
    require_dir(path)
    if layout.parse_step(path.name) is not None:
        raise ConfigError(f"'{path}' is a checkpoint. Fix: pass the run directory that contains it")
    if not is_run(fsio.list_dir(path)):
        raise ConfigError(
            f"'{path}' is not a run directory (no checkpoint, no {LOCK}). Fix: `checkpoint ls` lists "
            f"all runs"
        )


def is_run(names: list[str]) -> bool:
    """Return True if a directory that contains these names is a run directory."""
    marks = (layout.POINTER, LOCK, *LEFTOVERS)
    return any(name.startswith(marks) or layout.parse_step(name) is not None for name in names)


def runs_below(root: Path) -> Iterator[Path]:
    """Yield run directories at or below `root` by name, without following links."""
    for directory, names, files in os.walk(root, onerror=partial(logger.warning, "skipped: %s")):
        if is_run([*names, *files]):
            yield Path(directory)
        names[:] = sorted(
            name for name in names if name[0] != "." and layout.parse_step(name) is None
        )


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint itself, or all checkpoints of a run. Raises `ConfigError` if there is
    none.
    """
    if layout.parse_step(path.name) is not None:
        require_dir(path)
        return [path]
    require_run(path)
    if found := layout.checkpoints(path):
        return [info.path for info in found]
    raise ConfigError(f"'{path}' has no checkpoint yet. Fix: wait for the first save")


def checkpoint_to_export(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint itself, or the one from which the run would resume, with notes."""
    found = checkpoints_at(path)
    if found == [path]:
        return path, ()
    selection = choice.select(path)
    assert selection.chosen is not None, "else it raises"
    return selection.chosen.path, selection.notes


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return the contents of a run directory, and the checkpoint to resume from, for JSON."""
    try:
        selection = choice.select(run_dir)
    except choice.NoUsableCheckpointError as error:
        selection = choice.Selection((), (str(error),))
    pointed_step = layout.read_pointer(run_dir).step
    resume_step = selection.chosen.step if selection.chosen else None
    checkpoints = [
        {
            "step": info.step,
            "status": info.status,
            "reason": info.reason,
            "published": info.published,
            "pointer": info.step == pointed_step,
            "resume": info.step == resume_step,
            "path": str(info.path),
            "size_bytes": tree_bytes(info.path),
            "world_size": info.manifest and info.manifest.world_size,
            "loss": info.manifest and info.manifest.loss,
            "created_utc": info.manifest and info.manifest.created_utc,
        }
        for info in layout.checkpoints(run_dir)
    ]
    leftovers = [
        {"name": name, "size_bytes": tree_bytes(run_dir / name)}
        for name in fsio.list_dir(run_dir)
        if name.startswith(LEFTOVERS)
    ]
    return {
        "run_dir": str(run_dir),
        "checkpoints": checkpoints,
        "leftovers": leftovers,
        "resume_step": resume_step,
        "notes": selection.notes,
        "mirror": mirror_of(run_dir),
    }


def as_lines(run: dict[str, Any]) -> Iterator[str]:
    """Yield the result of `read_run` as the lines of a table."""
    yield run["run_dir"]
    if run["checkpoints"]:
        yield f"{'step':>9}  {'status':10}  {'size':>9}  {'ranks':>5}  {'loss':>8}  created (UTC)"
    elif not run["notes"]:
        yield "  no checkpoint yet"
    for found in run["checkpoints"]:
        size = readable(found["size_bytes"])
        ranks = found["world_size"] or "-"
        loss = "-" if found["loss"] is None else f"{found['loss']:.4f}"
        created = (found["created_utc"] or "-")[:19]
        marks = [found["reason"]] if found["reason"] else []
        marks += ["pointer"] if found["pointer"] else []
        marks += ["resumes from here"] if found["resume"] else []
        row = f"{found['step']:9}  {found['status']:10}  {size:>9}  {ranks:>5}  {loss:>8}"
        yield f"{row}  {created:19}  {', '.join(marks)}".rstrip()
    if run["mirror"]:
        yield mirror_line(run["mirror"])
    for left in run["leftovers"]:
        yield f"  {left['name']}  {readable(left['size_bytes'])}"
    for note in run["notes"]:
        yield from (f"  {line}" for line in note.splitlines())


def mirror_of(run_dir: Path) -> dict[str, Any]:
    """Return the run's record of its mirror; {} without a mirror."""
    return read_object(run_dir / STATE)


def mirror_line(mirror: dict[str, Any]) -> str:
    """Return a line with the steps that were complete in the mirror at the last check."""
    found = mirror.get("steps")
    steps = ", ".join(map(str, found)) if isinstance(found, list) and found else "none"
    failed = f"; since then it failed: {mirror['failed']}" if mirror.get("failed") else ""
    return f"  mirror {mirror.get('url')}  steps: {steps}{failed}"


def printable(text: str) -> str:
    """Escape control characters. Names and manifests come from a disk that other users may write
    to.
    """
    return text if text.isprintable() else ascii(text)


def prove(path: Path) -> list[str]:
    """Hash a whole checkpoint. Return a line for each file that differs from its manifest."""
    info = layout.inspect(path)
    count = min(MAX_HASH_THREADS, len(os.sched_getaffinity(0)))
    try:
        manifest = info.manifest or parse_manifest(fsio.read_bytes(path / MANIFEST))
    except (OSError, ManifestError):
        return [info.reason]
    with ThreadPoolExecutor(count) as pool:
        found = pool.map(lambda i: verify_files(path, manifest, share=(i, count)), range(count))
        problems = [problem for share in found for problem in share]
    return problems or ([info.reason] if info.reason else [])
