"""The run directory: names, and what stands in it. Rank 0 only; no torch.

A checkpoint appears by one rename (`commit`) and becomes the one to continue from by `publish`;
`retention` says how long it stays.
Everything is recomputed from the disk each time; nothing is ordered by a clock or a modification
time.
"""

import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.checkpoint import fsio
from trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from trainer.config import ConfigError
from trainer.runtime.files import regular_opener, try_lock

POINTER = "latest_checkpointed_iteration.txt"
POINTER_BYTES = 2**16
"""More than any number needs."""
PUBLISHED = ".published"
FSDP_CONFIG = "fsdp_config.json"
DATA = "data.pt"
HUGGINGFACE = "huggingface"
STAGING_PREFIX = ".staging_"
TRASH_PREFIX = ".trash_"
CORRUPT_PREFIX = ".corrupt_"
READING_PREFIX = ".reading_"
SAVE_TIMEOUT_S = 1800.0
"""A save, or an upload without an answer, that takes longer is given up and tried again."""
IN_USE = "in_use"
"""Its reader holds the lock on this file of a `READING_PREFIX` directory."""


_STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]*)")
_POINTER_TEXT = re.compile(r"(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

logger = logging.getLogger(__name__)


def step_dir_name(step: int) -> str:
    return f"global_step_{step}"


def parse_step(name: str) -> int | None:
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match else None


def model_file(world_size: int, rank: int) -> str:
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def optim_file(world_size: int, rank: int) -> str:
    return f"optim_world_size_{world_size}_rank_{rank}.pt"


def extra_file(world_size: int, rank: int) -> str:
    return f"extra_state_world_size_{world_size}_rank_{rank}.pt"


def is_export(path: str) -> bool:
    """Return True for a file in a manifest that belongs to the export: no resume needs it."""
    return path.startswith(f"{HUGGINGFACE}/")


def staging_dir(run_dir: Path, step: int) -> Path:
    """A new name for a checkpoint in the making, on the same file system as its final one."""
    return run_dir / f"{STAGING_PREFIX}{step_dir_name(step)}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Pointer:
    """`raw` is what the pointer file says, or why it cannot be read; None = no file. `step` is
    None if it is none.
    """

    raw: str | None
    step: int | None


def read_pointer(run_dir: Path) -> Pointer:
    try:
        raw = fsio.read_bytes(run_dir / POINTER, limit_bytes=POINTER_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return Pointer(None, None)
    except OSError as error:
        return Pointer(f"unreadable: {error.strerror}", None)
    match = _POINTER_TEXT.fullmatch(raw.strip())
    return Pointer(raw[:80], int(match[1]) if match else None)


@dataclass(frozen=True)
class CheckpointInfo:
    """One `global_step_N` as found on the disk. `published`: the pointer has named it once."""

    step: int
    path: Path
    reason: str = ""
    published: bool = False
    manifest: Manifest | None = None

    @property
    def nonce(self) -> str | None:
        return self.manifest.nonce if self.manifest else None

    @property
    def status(self) -> Literal["committed", "incomplete"]:
        """committed: its manifest and the sizes of all files that a resume needs agree (contents
        are proven by `verify_files`). incomplete: they do not, for the `reason` given.
        """
        return "committed" if self.manifest else "incomplete"


def inspect(path: Path) -> CheckpointInfo:
    """Judge one directory from names and sizes. Raises `ConfigError` if it is not called
    `global_step_N`.
    """
    step = parse_step(path.name)
    if step is None:
        raise ConfigError(
            f"'{path}' is not a checkpoint: give a directory called global_step_<step>"
        )
    try:
        fsio.require_dir(path)
        names = fsio.list_dir(path)
        if MANIFEST not in names:
            if PUBLISHED in names:
                raise OSError(f"its {MANIFEST} was removed")
            raise OSError(
                f"it has no {MANIFEST}: its save did not finish, or another trainer wrote it"
            )
        manifest = parse_manifest(fsio.read_bytes(path / MANIFEST), step=step)
        for record in manifest.files:
            if not is_export(record.path) and (problem := fsio.size_problem(path, record)):
                raise OSError(problem)
    except ManifestError as error:
        return CheckpointInfo(step, path, f"{MANIFEST}: {error}")
    except OSError as error:
        file_name = "" if error.filename is None else f"{Path(str(error.filename)).name}: "
        return CheckpointInfo(step, path, f"{file_name}{error.strerror or error}")
    return CheckpointInfo(step, path, published=PUBLISHED in names, manifest=manifest)


def checkpoints(run_dir: Path) -> list[CheckpointInfo]:
    """Return everything called `global_step_N`, whatever its state, by rising step.

    A directory that is deleted meanwhile is left out.
    """
    names = [name for name in fsio.list_dir(run_dir) if parse_step(name) is not None]
    found = sorted((inspect(run_dir / name) for name in names), key=lambda info: info.step)
    return [info for info in found if info.manifest or os.path.lexists(info.path)]


def committed(run_dir: Path) -> list[CheckpointInfo]:
    return [info for info in checkpoints(run_dir) if info.status == "committed"]


def commit(staging: Path, step: int, *, nonce: str) -> Path:
    """Give a finished staging directory, whose manifest has the `nonce`, its final name: from now
    on it exists.

    Its files must be synced (`fsio.fsync_tree`). What already has the name, left by a corrupt or an
    abandoned attempt at this step, is set aside. Raises `FileExistsError` instead if the pointer
    names it and it is whole: no crash may leave the run without it, and a step that is saved need
    not be saved again.
    """
    final = staging.parent / step_dir_name(step)
    if final.name in fsio.list_dir(final.parent):
        if read_pointer(final.parent).step == step and inspect(final).status != "incomplete":
            raise FileExistsError(
                f"'{final}' is the checkpoint this run continues from: it is never replaced"
            )
        quarantine(final, "this step is being written anew")
    try:
        fsio.rename_unsynced(staging, final)
    except OSError:
        # a network file system that lost the answer to a rename it carried out reports an error on
        # the second try
        if staging.exists() or inspect(final).nonce != nonce:
            raise
    fsio.fsync_dir(final.parent)
    return final


def publish(run_dir: Path, step: int) -> None:
    """Point to `step`, then mark it as named once. Repairs what a crash left; writes nothing if
    all is right.
    """
    step_dir = run_dir / step_dir_name(step)
    unmarked = PUBLISHED not in fsio.list_dir(step_dir)
    if unmarked or read_pointer(run_dir).step != step:
        fsio.atomic_write(run_dir / POINTER, str(step).encode())
    if unmarked:
        mark(step_dir, PUBLISHED)


def is_published(run_dir: Path, info: CheckpointInfo) -> bool:
    """Return True if `publish` has nothing left to do for a checkpoint of this run."""
    return info.published and read_pointer(run_dir).step == info.step


def mark(step_dir: Path, name: str) -> None:
    """Make an empty file, which is durable on return also where an earlier attempt to make it
    was cut short.
    """
    if name not in fsio.list_dir(step_dir):
        fsio.write_file(step_dir / name, b"", root=step_dir)
    fsio.fsync_dir(step_dir)


def quarantine(path: Path, reason: str) -> Path:
    """Set a checkpoint aside as `.corrupt_global_step_N.<k>`; it is never deleted automatically."""
    taken = fsio.list_dir(path.parent)
    name = next(
        name
        for k in range(len(taken) + 1)
        if (name := f"{CORRUPT_PREFIX}{path.name}.{k}") not in taken
    )
    fsio.rename(path, path.parent / name)
    logger.warning("set %s aside as %s: %s", path, name, reason)
    return path.parent / name


def is_in_use(reading: Path) -> bool:
    """Return True unless the reader of a `READING_PREFIX` directory is known to be dead."""
    try:
        # open for writing: NFS locks no other file exclusively
        descriptor = regular_opener(os.O_RDWR, follow_links=False)(str(reading / IN_USE), 0)
    except OSError:
        return True
    try:
        return try_lock(descriptor) is not True
    except OSError:
        return True
    finally:
        os.close(descriptor)


def clean_leftovers(run_dir: Path) -> None:
    """Remove what an earlier crash left half-written or half-deleted, and what killed readers left.
    Only under the run's lock.

    Directories of a temporary name are exports under way, which need no lock.
    """
    for name in fsio.list_dir(run_dir):
        is_file = _TEMPORARY.fullmatch(name) and not (run_dir / name).is_dir()
        is_abandoned = name.startswith(READING_PREFIX) and not is_in_use(run_dir / name)
        if name.startswith((STAGING_PREFIX, TRASH_PREFIX)) or is_file or is_abandoned:
            try:
                fsio.remove_tree(run_dir / name)
            except OSError as error:
                logger.warning("cannot remove the leftover %s: %s", run_dir / name, error)
