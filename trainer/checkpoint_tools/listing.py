"""What stands in run directories: found, measured, proven, and put into words (floor 5, no torch).

Old checkpoints of a run that does not train are deleted, never what a resume needs.
"""

import dataclasses
import logging
import os
import secrets
import sys
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
from trainer.checkpoint.lock import LOCK, NoLocksError, RunLock
from trainer.checkpoint.manifest import MANIFEST, ManifestError, parse_manifest, verify_files
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.mirror import STATE
from trainer.runtime.files import tree_bytes
from trainer.runtime.json_lines import read_object
from trainer.runtime.text import readable

RUNS_ROOT = Path("checkpoints")
NUM_LOOKS = 5
MAX_HASH_THREADS = 8
LEFTOVERS = {
    STAGING_PREFIX: "a save under way, or cut short",
    TRASH_PREFIX: "a deletion under way, or cut short",
    CORRUPT_PREFIX: "set aside as damaged",
    READING_PREFIX: "links of a reader (evaluate, the mirror), or of one that was killed",
}

logger = logging.getLogger(__name__)


def require_dir(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"no directory '{path}': give a run's, {RUNS_ROOT}/<project_name>/<experiment_name>"
        )


def require_run(path: Path) -> None:
    require_dir(path)
    if layout.parse_step(path.name) is not None:
        raise ConfigError(f"'{path}' is one checkpoint: give the run directory above it")
    if not is_run(fsio.list_dir(path)):
        raise ConfigError(
            f"'{path}' is no run directory (no checkpoint, no {LOCK}): 'ls' alone lists what there "
            f"is"
        )


def is_run(names: list[str]) -> bool:
    """Whether a directory with these names in it is a run's."""
    return any(
        n.startswith((layout.POINTER, LOCK, *LEFTOVERS)) or layout.parse_step(n) is not None
        for n in names
    )


def runs_below(root: Path) -> Iterator[Path]:
    """Run directories at or below `root`, by name; links below it are not followed."""
    for directory, names, files in os.walk(root, onerror=partial(logger.warning, "skipped: %s")):
        if is_run([*names, *files]):
            yield Path(directory)
        names[:] = sorted(
            name for name in names if name[0] != "." and layout.parse_step(name) is None
        )


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint itself, or all of a run. Raises `ConfigError` if there is none: nothing
    would be proven.
    """
    if layout.parse_step(path.name) is not None:
        require_dir(path)
        return [path]
    require_run(path)
    if found := layout.checkpoints(path):
        return [info.path for info in found]
    raise ConfigError(f"'{path}' holds no checkpoint to verify: wait for the first save")


def checkpoint_to_export(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint itself, or the one of a run that a resume takes, with the notes on why
    that one.
    """
    if layout.parse_step(path.name) is not None:
        require_dir(path)
        return path, ()
    require_run(path)
    selection = choice.select(path)
    if selection.chosen is None:
        raise ConfigError(f"'{path}' holds no checkpoint to export: wait for the first save")
    return selection.chosen.path, selection.notes


@dataclass(frozen=True)
class Listing:
    """`resume_step`: which one a resume takes. `notes`: why, or why none of them. `mirror`: as
    the run last saw it.
    """

    run_dir: Path
    checkpoints: list[CheckpointInfo]
    leftovers: list[Path]
    pointed_step: int | None
    resume_step: int | None
    notes: tuple[str, ...]
    mirror: dict[str, Any]


def read_run(run_dir: Path) -> Listing:
    """What stands in a run directory. While the run trains, things move: look again until
    nothing moved meanwhile.
    """
    for _ in range(NUM_LOOKS):
        names, pointer = fsio.list_dir(run_dir), layout.read_pointer(run_dir)
        try:
            selection = choice.select(run_dir)
        except choice.NoUsableCheckpointError as error:
            selection = choice.Selection((), (f"WARNING: {error}",))
        found = layout.checkpoints(run_dir)
        if (names, pointer) == (fsio.list_dir(run_dir), layout.read_pointer(run_dir)):
            break
    there = [info for info in found if info.status != "incomplete" or os.path.lexists(info.path)]
    leftovers = [run_dir / name for name in names if name.startswith(tuple(LEFTOVERS))]
    resume_step = selection.chosen.step if selection.chosen else None
    mirror = read_object(run_dir / STATE)
    return Listing(run_dir, there, leftovers, pointer.step, resume_step, selection.notes, mirror)


def as_tree(listing: Listing) -> dict[str, Any]:
    """The listing as plain containers."""
    checkpoints = []
    for info in listing.checkpoints:
        own = {name: getattr(info, name) for name in ("step", "status", "reason", "published")}
        marks = {
            "pointer": info.step == listing.pointed_step,
            "resume": info.step == listing.resume_step,
        }
        about = {
            name: getattr(info.manifest, name, None)
            for name in ("world_size", "loss", "created_utc")
        }
        checkpoints.append(
            {**own, **marks, "path": str(info.path), "size_bytes": tree_bytes(info.path), **about}
        )
    leftovers = [{"name": path.name, "size_bytes": tree_bytes(path)} for path in listing.leftovers]
    rest = {"resume_step": listing.resume_step, "notes": listing.notes, "mirror": listing.mirror}
    return {
        "run_dir": str(listing.run_dir),
        "checkpoints": checkpoints,
        "leftovers": leftovers,
        **rest,
    }


def as_lines(listing: Listing) -> Iterator[str]:
    """The listing as a table."""
    yield printable(str(listing.run_dir))
    if listing.checkpoints:
        yield f"{'step':>9}  {'status':10}  {'size':>9}  {'ranks':>5}  {'loss':>8}  created (UTC)"
    elif not listing.notes:
        yield "  no checkpoint yet"
    for info in listing.checkpoints:
        manifest = info.manifest
        loss = "-" if manifest is None or manifest.loss is None else f"{manifest.loss:.4f}"
        ranks, created = (manifest.world_size, manifest.created_utc) if manifest else ("-", "-")
        marks = [info.reason, "pointer" * (info.step == listing.pointed_step)]
        text = ", ".join(
            mark
            for mark in [*marks, "resume takes it" * (info.step == listing.resume_step)]
            if mark
        )
        row = f"{info.step:9}  {info.status:10}  {readable(tree_bytes(info.path)):>9}  {ranks:>5}  {loss:>8}  "
        yield printable(f"{row}{created[:19]:19}  {text}".rstrip())
    if listing.mirror:
        yield printable(mirror_line(listing.mirror))
    for path in listing.leftovers:
        meaning = next(
            meaning for prefix, meaning in LEFTOVERS.items() if path.name.startswith(prefix)
        )
        yield printable(f"  {path.name}  {readable(tree_bytes(path))}  {meaning}")
    in_table = tuple(info.reason for info in listing.checkpoints if info.reason)
    for note in listing.notes:
        yield from (
            printable(f"  {line}") for line in note.splitlines() if not line.endswith(in_table)
        )


def mirror_line(mirror: dict[str, Any]) -> str:
    found = mirror.get("steps")
    steps = ", ".join(map(str, found if isinstance(found, list) else [])) or "none"
    failed = f"; since then it failed: {mirror['failed']}" if mirror.get("failed") else ""
    return f"  mirror {mirror.get('url')}  steps: {steps}{failed}"


def printable(text: str) -> str:
    """Names and manifests come from a disk anyone may have written to: no control characters
    reach the terminal.
    """
    return text if text.isprintable() else ascii(text)


def prove(path: Path) -> list[str]:
    """Hash a checkpoint and name each file that is not as its manifest says; [] = every byte is
    as it was written.
    """
    info = layout.inspect(path)
    try:
        manifest = info.manifest or parse_manifest(fsio.read_bytes(path / MANIFEST))
    except (OSError, ManifestError):
        return [info.reason]
    alone = [
        dataclasses.replace(manifest, files=(f,))
        for f in sorted(manifest.files, key=lambda f: -f.size_bytes)
    ]
    problems = []
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for num_done, found in enumerate(pool.map(partial(verify_files, path), alone), start=1):
            problems += found
            _show_progress(f"{path.name}: {num_done} of {len(alone)} files")
    _show_progress("")
    return problems or ([info.reason] if info.status == "incomplete" else [])


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Pruning:
    """What stays of a run and what goes, given that `keep` checkpoints stay, and whether damaged
    ones go too.

    `proofs` must verify before anything goes: the newest checkpoint, and the one a resume takes.
    """

    run_dir: Path
    keep: int
    is_corrupt_deleted: bool
    kept: list[str]
    proofs: list[CheckpointInfo]
    to_delete: list[Path]


def plan_pruning(run_dir: Path, *, keep: int, is_corrupt_deleted: bool) -> Pruning:
    """Raises `ConfigError` naming the holder while the run trains, and where a resume would
    find nothing.
    """
    require_run(run_dir)
    with _locked(run_dir):
        return _plan(run_dir, keep, is_corrupt_deleted)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Raises `ConfigError` naming the holder. Not held while hashing: a run that starts then
    need not wait.
    """
    lock = RunLock(run_dir)
    try:
        lock.acquire(timeout_s=LOCK_TIMEOUT_S)
    except NoLocksError as error:
        raise ConfigError(
            f"'{run_dir}' is on a file system without locks (flock): 'prune' cannot tell whether a "
            "run trains there. Fix: once no run does, delete old global_step_* directories by hand"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _plan(run_dir: Path, keep: int, is_corrupt_deleted: bool) -> Pruning:
    """Raises `ConfigError` where a resume would find nothing: what looks left over may be all
    that is left.
    """
    chosen = choice.select(run_dir).chosen
    protect = {chosen.step} if chosen else set()
    old = retention.checkpoints_to_delete(run_dir, keep=keep, protect=protect)
    kept = [info for info in layout.checkpoints(run_dir) if info.path not in old]
    committed = [info for info in kept if info.status == "committed"]
    proofs = [info for info in committed if info is committed[-1] or info.step in protect]
    prefixes = tuple(
        prefix for prefix in LEFTOVERS if prefix != CORRUPT_PREFIX or is_corrupt_deleted
    )
    leftovers = [
        run_dir / name
        for name in fsio.list_dir(run_dir)
        if name.startswith(prefixes)
        and not (name.startswith(READING_PREFIX) and layout.is_in_use(run_dir / name))
    ]
    names = [
        info.path.name if info in committed else f"{info.path.name} ({info.status})"
        for info in kept
    ]
    return Pruning(run_dir, keep, is_corrupt_deleted, names, proofs, old + leftovers)


def prune(pruning: Pruning) -> None:
    """Delete what was planned.

    Raises `OSError` before anything is deleted if a proof fails, `CannotWriteError` for what cannot
    be deleted.
    """
    run_dir = pruning.run_dir
    asked = (run_dir, pruning.keep, pruning.is_corrupt_deleted)
    for info in pruning.proofs:
        found = prove(info.path)
        for problem in filter(layout.is_export, found):
            logger.warning(
                "%s: %s; a resume does not need it, and 'export' makes another", info.path, problem
            )
        if problems := [problem for problem in found if not layout.is_export(problem)]:
            raise OSError(
                f"nothing was deleted, because '{info.path}' is damaged: {'; '.join(problems)}. "
                "Start the run (it sets the checkpoint aside and continues from an older one) or "
                "move it away, then prune again"
            )
    with _locked(run_dir):
        if _plan(*asked) != pruning:
            raise ConfigError(
                f"nothing was deleted, because '{run_dir}' changed meanwhile: prune again"
            )
        protect = {info.step for info in pruning.proofs}
        retention.rotate(run_dir, keep=pruning.keep, protect=protect)
        for path in pruning.to_delete:
            if path.name.startswith(CORRUPT_PREFIX):
                try:
                    fsio.rename(path, run_dir / f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}")
                except OSError as error:
                    logger.warning("cannot delete %s: %s", path, error)
        layout.clean_leftovers(run_dir)
        after = _plan(*asked)
        if left := [path.name for path in after.to_delete]:
            raise CannotWriteError(
                f"cannot delete all of it (reasons above), still in '{run_dir}': {', '.join(left)}"
            )
