"""Look at run directories from outside: their contents, damage, and old checkpoints."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.layout import (
    CORRUPT_PREFIX,
    READING_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    CheckpointInfo,
)
from trainer.checkpoint.lock import LOCK, RunLock
from trainer.checkpoint.manifest import MANIFEST, ManifestError, parse_manifest, verify_files
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.files import tree_bytes
from trainer.runtime.json_lines import read_object
from trainer.runtime.text import readable
from trainer.tools.mirror import STATE

RUNS_ROOT = Path("checkpoints")
MAX_HASH_THREADS = 8
LOCK_TIMEOUT_S = 1.0
LEFTOVERS = {
    STAGING_PREFIX: "an unfinished save",
    TRASH_PREFIX: "an unfinished deletion",
    CORRUPT_PREFIX: "set aside as damaged",
    READING_PREFIX: "links of a reader (evaluate or the mirror)",
}

logger = logging.getLogger(__name__)


def require_dir(path: Path) -> None:
    """Raise `ConfigError` unless the path is a directory."""
    if not path.is_dir():
        raise ConfigError(
            f"no directory '{path}'.\nFix: give a run directory, "
            f"{RUNS_ROOT}/<project_name>/<experiment_name>"
        )


def require_run(path: Path) -> None:
    """Raise `ConfigError` unless the path is a run directory."""
    require_dir(path)
    if layout.parse_step(path.name) is not None:
        raise ConfigError(f"'{path}' is a checkpoint. Fix: give the run directory above it")
    if not is_run(fsio.list_dir(path)):
        raise ConfigError(
            f"'{path}' is no run directory (no checkpoint, no {LOCK}). Fix: `checkpoint ls` lists "
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
    """Return the checkpoint itself, or the one that a resume of the run takes, with notes."""
    if layout.parse_step(path.name) is not None:
        require_dir(path)
        return path, ()
    require_run(path)
    selection = choice.select(path)
    if selection.chosen is None:
        raise ConfigError(f"'{path}' has no checkpoint yet. Fix: wait for the first save")
    return selection.chosen.path, selection.notes


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return the contents of a run directory, and the checkpoint that a resume takes, for JSON."""
    try:
        selection = choice.select(run_dir)
    except choice.NoUsableCheckpointError as error:
        selection = choice.Selection((), (f"WARNING: {error}",))
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
        if name.startswith(tuple(LEFTOVERS))
    ]
    return {
        "run_dir": str(run_dir),
        "checkpoints": checkpoints,
        "leftovers": leftovers,
        "resume_step": resume_step,
        "notes": selection.notes,
        "mirror": read_object(run_dir / STATE),
    }


def as_lines(run: dict[str, Any]) -> Iterator[str]:
    """Yield the result of `read_run` as the lines of a table."""
    yield run["run_dir"]
    if run["checkpoints"]:
        yield f"{'step':>9}  {'status':10}  {'size':>9}  {'ranks':>5}  {'loss':>8}  created (UTC)"
    elif not run["notes"]:
        yield "  no checkpoint yet"
    for found in run["checkpoints"]:
        size, ranks = readable(found["size_bytes"]), found["world_size"] or "-"
        loss = "-" if found["loss"] is None else f"{found['loss']:.4f}"
        created = (found["created_utc"] or "-")[:19]
        marks = [found["reason"]] if found["reason"] else []
        marks += ["pointer"] if found["pointer"] else []
        marks += ["resume takes it"] if found["resume"] else []
        row = f"{found['step']:9}  {found['status']:10}  {size:>9}  {ranks:>5}  {loss:>8}"
        yield f"{row}  {created:19}  {', '.join(marks)}".rstrip()
    if run["mirror"]:
        yield mirror_line(run["mirror"])
    for left in run["leftovers"]:
        meanings = [text for prefix, text in LEFTOVERS.items() if left["name"].startswith(prefix)]
        yield f"  {left['name']}  {readable(left['size_bytes'])}  {meanings[0]}"
    for note in run["notes"]:
        yield from (f"  {line}" for line in note.splitlines())


def mirror_line(mirror: dict[str, Any]) -> str:
    """Return a line with the steps that were complete in the mirror when the run last looked."""
    steps = ", ".join(map(str, mirror.get("steps") or [])) or "none"
    failed = f"; since then it failed: {mirror['failed']}" if mirror.get("failed") else ""
    return f"  mirror {mirror.get('url')}  steps: {steps}{failed}"


def printable(text: str) -> str:
    """Escape control characters. Names and manifests come from a disk that anyone may write to."""
    return text if text.isprintable() else ascii(text)


def prove(path: Path) -> list[str]:
    """Hash a whole checkpoint. Return a line for each file that differs from its manifest."""
    info, count = layout.inspect(path), min(MAX_HASH_THREADS, len(os.sched_getaffinity(0)))
    try:
        manifest = info.manifest or parse_manifest(fsio.read_bytes(path / MANIFEST))
    except (OSError, ManifestError):
        return [info.reason]
    with ThreadPoolExecutor(count) as pool:
        shares = pool.map(
            lambda index: verify_files(path, manifest, share=(index, count)), range(count)
        )
        problems = [problem for share in shares for problem in share]
    return problems or ([info.reason] if info.reason else [])


@dataclass(frozen=True)
class Pruning:
    """Names of the checkpoints to keep, and paths to delete once `proofs` have verified."""

    kept: list[str]
    proofs: list[CheckpointInfo]
    to_delete: list[Path]


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run. Raises `ConfigError` that names the holder."""
    require_run(run_dir)
    lock = RunLock(run_dir)
    lock.acquire(timeout_s=LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def plan_pruning(run_dir: Path, *, keep: int, deletes_corrupt: bool) -> Pruning:
    """Plan to keep the newest `keep` checkpoints and the one a resume takes. Call it under the lock.

    Raises `ConfigError` if a resume would find nothing: leftovers may be all that is left.
    """
    chosen = choice.select(run_dir).chosen
    protect = {chosen.step} if chosen else set()
    old = retention.checkpoints_to_delete(run_dir, keep=keep, protect=protect)
    kept = [info for info in layout.checkpoints(run_dir) if info.path not in old]
    committed = [info for info in kept if info.status == "committed"]
    prefixes = [p for p in LEFTOVERS if p != CORRUPT_PREFIX or deletes_corrupt]
    leftovers = [
        run_dir / name
        for name in fsio.list_dir(run_dir)
        if name.startswith(tuple(prefixes))
        and not (name.startswith(READING_PREFIX) and layout.is_in_use(run_dir / name))
    ]
    return Pruning(
        kept=[
            info.path.name if info.manifest else f"{info.path.name} ({info.status})"
            for info in kept
        ],
        proofs=[info for info in committed if info is committed[-1] or info.step in protect],
        to_delete=old + leftovers,
    )


def prune(pruning: Pruning) -> None:
    """Delete what was planned. Call it under the lock.

    Raises `OSError` before it deletes anything if a proof fails, `CannotWriteError` for paths that
    it cannot delete.
    """
    for info in pruning.proofs:
        problems = prove(info.path)
        for problem in filter(layout.is_export, problems):
            logger.warning(
                "%s: %s; a resume does not need it, and 'export' makes another", info.path, problem
            )
        if problems := [problem for problem in problems if not layout.is_export(problem)]:
            raise OSError(
                f"nothing was deleted, because '{info.path}' is damaged: {'; '.join(problems)}.\n"
                "Fix: start the run (it sets the checkpoint aside and continues from an older one) "
                "or move it away, then prune again"
            )
    if left := [path.name for path in pruning.to_delete if not retention.delete(path)]:
        raise CannotWriteError(f"cannot delete (reasons above): {', '.join(left)}")
