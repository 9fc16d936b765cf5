"""The run directory: its file names and its checkpoints. For rank 0 only; imports no torch.

A single rename (`commit`) creates a checkpoint, and `publish` points to it for the next resume.
Nothing is cached: all functions read the disk. Clocks and modification times are never used.

The names of a checkpoint of step N:

    .staging_global_step_N.<nonce>   while it is written
    global_step_N                    committed; it gets a file `.published` with the pointer
    .discarded_global_step_N.<k>     set aside although it is intact, as after a rollback
    .corrupt_global_step_N.<k>       set aside because it is damaged
    .trash_<name>.<nonce>            while it is deleted
    .reading_global_step_N.<nonce>   hard links of a process that reads it
"""

import logging
import os
import re
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from trainer.checkpoint import fsio
from trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from trainer.config import ConfigError
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.runtime.files import regular_opener, try_lock

POINTER = "latest_checkpointed_iteration.txt"
PUBLISHED = ".published"
"""An empty file that marks each checkpoint that the pointer has ever named."""
FSDP_CONFIG = "fsdp_config.json"
DATA = "data.pt"
HUGGINGFACE = "huggingface"
STAGING_PREFIX = ".staging_"
TRASH_PREFIX = ".trash_"
CORRUPT_PREFIX = ".corrupt_"
DISCARDED_PREFIX = ".discarded_"
"""An intact checkpoint from which the run no longer continues."""
ASIDE_PREFIXES = (CORRUPT_PREFIX, DISCARDED_PREFIX)
"""Checkpoints that were set aside. They are never deleted automatically."""
READING_PREFIX = ".reading_"
IN_USE = "in_use"
"""A file in a `READING_PREFIX` directory, on which the reader holds a lock."""
SAVE_TIMEOUT_S = 1800.0
"""Timeout in seconds for a save, and for an upload that gets no response."""

_STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]*)")
_POINTER_TEXT = re.compile(r"(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

logger = logging.getLogger(__name__)


def new_run_from(checkpoint: Path) -> str:
    """Return a fix that starts a new run from a checkpoint's weights."""
    export = checkpoint / HUGGINGFACE
    is_adapter = (export / ADAPTER_CONFIG).exists()
    key = "model.lora_adapter_path" if is_adapter else "model.partial_pretrain"
    return f"start a new run with trainer.experiment_name=<new name> and {key}={export}"


def step_dir_name(step: int) -> str:
    return f"global_step_{step}"


def parse_step(name: str) -> int | None:
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match else None


def _rank_file(kind: str, world_size: int, rank: int) -> str:
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


model_file = partial(_rank_file, "model")
optim_file = partial(_rank_file, "optim")
extra_file = partial(_rank_file, "extra_state")


def is_export(path: str) -> bool:
    """Return True for a file of the export. Resuming does not need the export.

    `path`: as in a manifest.
    """
    return path.startswith(f"{HUGGINGFACE}/")


def staging_dir(run_dir: Path, step: int) -> Path:
    """Return a new name for an unfinished checkpoint, on the file system of its final name."""
    return run_dir / f"{STAGING_PREFIX}{step_dir_name(step)}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Pointer:
    """The content of the pointer file.

    `raw`: its text, or the reason why it is unreadable; None if there is no file. `step`: None if
    the text is not a step.
    """

    raw: str | None
    step: int | None


def pointed_step(text: str) -> int | None:
    """Return the step in the text of a pointer file; None for any other text."""
    match = _POINTER_TEXT.fullmatch(text.strip())
    return int(match[1]) if match else None


def read_pointer(run_dir: Path) -> Pointer:
    try:
        raw = fsio.read_bytes(run_dir / POINTER).decode(errors="replace")
    except FileNotFoundError:
        return Pointer(None, None)
    except OSError as error:
        return Pointer(f"unreadable: {error.strerror}", None)
    return Pointer(raw[:80], pointed_step(raw))


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: a directory `global_step_N` with a valid manifest.

    All files needed to resume have the sizes in the manifest; `verify_files` proves their
    contents. `published`: True if the pointer has ever named the checkpoint.
    """

    step: int
    path: Path
    manifest: Manifest
    published: bool = False
    status: ClassVar = "committed"
    reason: ClassVar = ""

    @property
    def nonce(self) -> str:
        return self.manifest.nonce


@dataclass(frozen=True)
class IncompleteCheckpoint:
    """A directory `global_step_N` that is not a committed checkpoint, and the reason."""

    step: int
    path: Path
    reason: str
    status: ClassVar = "incomplete"
    published: ClassVar = False
    manifest: ClassVar = None
    nonce: ClassVar = None


Checkpoint = CheckpointInfo | IncompleteCheckpoint


def inspect(path: Path) -> Checkpoint:
    """Judge a checkpoint by its file names and sizes.

    Raises `ConfigError` if the directory is not called `global_step_N`.
    """
    step = parse_step(path.name)
    if step is None:
        raise ConfigError(
            f"'{path}' is not a checkpoint.\nFix: give a directory called global_step_<step>"
        )
    try:
        fsio.require_dir(path)
        names = fsio.list_dir(path)
        if MANIFEST not in names:
            raise OSError(f"it has no {MANIFEST}, so this trainer never finished saving it")
        manifest = parse_manifest(fsio.read_bytes(path / MANIFEST), step=step)
        for record in manifest.files:
            if not is_export(record.path) and (problem := fsio.size_problem(path, record)):
                raise OSError(problem)
    except ManifestError as error:
        return IncompleteCheckpoint(step, path, f"{MANIFEST}: {error}")
    except OSError as error:
        file_name = "" if error.filename is None else f"{Path(str(error.filename)).name}: "
        return IncompleteCheckpoint(step, path, f"{file_name}{error.strerror or error}")
    return CheckpointInfo(step, path, manifest, published=PUBLISHED in names)


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return every `global_step_N`, committed or not, sorted by step.

    A directory that is deleted during the scan is left out.
    """
    names = [name for name in fsio.list_dir(run_dir) if parse_step(name) is not None]
    found = [inspect(run_dir / name) for name in names]
    found.sort(key=lambda info: info.step)
    return [info for info in found if info.manifest or os.path.lexists(info.path)]


def committed(run_dir: Path) -> list[CheckpointInfo]:
    return [info for info in checkpoints(run_dir) if info.manifest]


def commit(staging: Path, step: int, *, nonce: str) -> Path:
    """Rename a finished staging directory to its final name. From then on the checkpoint exists.

    `nonce`: the nonce in its manifest. Sync its files first (`fsio.fsync_tree`). A directory that
    already has the final name, from a corrupt or abandoned attempt, is set aside. Raises
    `FileExistsError` if that directory is complete and the pointer names it: a crash must not leave
    the run without it.
    """
    final = staging.parent / step_dir_name(step)
    if final.name in fsio.list_dir(final.parent):
        is_whole = inspect(final).manifest is not None
        if is_whole and read_pointer(final.parent).step == step:
            raise FileExistsError(
                f"this run continues from '{final}', so that checkpoint is never replaced"
            )
        prefix = DISCARDED_PREFIX if is_whole else CORRUPT_PREFIX
        quarantine(final, "this step is being saved again", prefix)
    try:
        fsio.rename_unsynced(staging, final)
    except OSError:
        # A network file system may carry out a rename, lose the answer, and fail the retry.
        if staging.exists() or inspect(final).nonce != nonce:
            raise
    fsio.fsync_dir(final.parent)
    return final


def publish(run_dir: Path, step: int) -> None:
    """Point to `step`, then mark it as published. Writes nothing if both are already done."""
    step_dir = run_dir / step_dir_name(step)
    unmarked = PUBLISHED not in fsio.list_dir(step_dir)
    if unmarked or read_pointer(run_dir).step != step:
        fsio.atomic_write(run_dir / POINTER, str(step).encode())
    if unmarked:
        mark_published(step_dir)


def mark_published(step_dir: Path) -> None:
    """Create the mark file durably, even if an earlier attempt was interrupted."""
    if PUBLISHED not in fsio.list_dir(step_dir):
        fsio.write_file(step_dir / PUBLISHED, b"", root=step_dir)
    fsio.fsync_dir(step_dir)


def quarantine(path: Path, reason: str, prefix: str = CORRUPT_PREFIX) -> Path:
    """Set a checkpoint aside as `<prefix>global_step_N.<k>`."""
    taken = fsio.list_dir(path.parent)
    number = 0
    while (name := f"{prefix}{path.name}.{number}") in taken:
        number += 1
    aside = path.with_name(name)
    fsio.rename(path, aside)
    logger.warning("renamed %s to %s: %s", path, name, reason)
    return aside


def is_in_use(reading: Path) -> bool:
    """Return False if the reader of a `READING_PREFIX` directory is known to be dead."""
    opener = regular_opener(os.O_RDWR, follow_links=False)
    try:
        # NFS gives an exclusive lock only on a file that is open for writing.
        with os.fdopen(opener(str(reading / IN_USE), 0), "rb") as file:
            return try_lock(file.fileno()) is not True
    except OSError:
        return True


def leftovers(run_dir: Path) -> list[str]:
    """Return the names of half-written or half-deleted files and of links left by dead readers.

    Directories with a temporary name are exports in progress, not leftovers.
    """

    def is_leftover(name: str) -> bool:
        if name.startswith(READING_PREFIX):
            return not is_in_use(run_dir / name)
        is_temporary = _TEMPORARY.fullmatch(name) is not None and not (run_dir / name).is_dir()
        return is_temporary or name.startswith((STAGING_PREFIX, TRASH_PREFIX))

    return [name for name in fsio.list_dir(run_dir) if is_leftover(name)]


def clean_leftovers(run_dir: Path) -> None:
    """Remove the leftovers of a crash. Call it only while holding the run's lock.

    An unfinished save is renamed first. A run that lost the lock without noticing could otherwise
    commit it while its files are being deleted.
    """
    for name in leftovers(run_dir):
        if name.startswith(STAGING_PREFIX):
            delete(run_dir / name)
            continue
        try:
            fsio.remove_tree(run_dir / name)
        except OSError as error:
            logger.warning("cannot remove the leftover %s: %s", run_dir / name, error)


def delete(path: Path) -> bool:
    """Rename a directory to the trash, then remove it. Logs a failure and returns False."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}")
    try:
        fsio.rename(path, trash)
        fsio.remove_tree(trash)
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, error)
        return False
    return True
