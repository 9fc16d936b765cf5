"""Claims the mirror before a run, and restores its newest checkpoint into an empty run directory."""

import logging
import tarfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST, Manifest
from trainer.checkpoint.storage import KEY, Storage, StorageError
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError, ResumableError
from trainer.runtime.text import readable
from trainer.tools.mirror.contents import (
    NEWER_FILES,
    RUN_FILES,
    MirrorState,
    claim,
    look,
    note,
    uploader_of,
)
from trainer.tools.mirror.upload import NUM_STREAMS, TRAVELS

MIN_UNPACKED_BYTES = 2**26
MAX_RATIO = 100
"""Logs may unpack to this many bytes, or to this multiple of the archive's size, whichever is more.
JSON lines compress 5 to 20 times; a malicious archive compresses 1,000 times.
"""
NUM_READS = 2
"""Downloads of a file before it counts as damaged. A broken connection may cause no error."""

logger = logging.getLogger(__name__)


class _DamagedError(Exception):
    """A file in the mirror differs from the manifest."""


def prepare(trainer: TrainerConfig, storage: Storage) -> None:
    """Check that the mirror belongs to this run. Restore from it if no local checkpoint is usable.

    Raises `ConfigError` for another run's mirror, and for a mirror that cannot be used or resumed
    from. If the storage is unreachable, raises the errors of `unreachable`.
    """
    own_step = _own_step(trainer)
    try:
        run_id = claim(trainer, storage)
        held = look(storage)
    except StorageError as error:
        return unreachable(trainer, error)
    if own_step is None and (held.whole or held.incomplete):
        restored = _restore(trainer, storage, held)
        note(Path(trainer.default_local_dir), storage, id=run_id)
        _show_origin(storage, run_id, restored)
    elif own_step is None:
        choice.select(Path(trainer.default_local_dir))  # raises if its checkpoints are damaged
    elif held.candidates and held.candidates[0].step > own_step:
        logger.warning(
            "%s has step %d and this machine has step %d: the run continues from its local "
            "checkpoint. To use the mirror's checkpoint, stop and move the run directory away",
            *(storage.url, held.candidates[0].step, own_step),
        )


def _show_origin(storage: Storage, run_id: str, restored: Manifest) -> None:
    """Warn about the origin of the checkpoint, because a different run may have the same names."""
    process = None
    with suppress(StorageError):
        process = uploader_of(storage)
    logger.warning(
        "this run continues the run %s in %s from step %d, saved at %s (uploaded by %s). If that "
        "is a different run, stop this run and choose a new trainer.experiment_name",
        *(run_id, storage.url, restored.step, restored.created_utc, process),
    )


def unreachable(trainer: TrainerConfig, error: StorageError) -> None:
    """Warn that the storage is unreachable, or raise if the run directory has no usable checkpoint.

    Without a checkpoint, the run could repeat steps that the mirror already has. Raises
    `ConfigError` if the storage refused access, otherwise `ResumableError`.
    """
    if _own_step(trainer) is not None:
        logger.warning("%s; training continues, and uploads will be retried", error)
    elif error.is_refusal:
        raise ConfigError(f"{error}.\nFix: grant access, or train without {KEY}") from error
    else:
        raise ResumableError(
            f"{error}; this machine has no checkpoint, but the mirror may have one.\n"
            f"Fix: try again, or train without {KEY}"
        ) from error


def _own_step(trainer: TrainerConfig) -> int | None:
    """Return the step from which the run directory would resume; None if no checkpoint is usable."""
    with suppress(NoUsableCheckpointError):
        if (chosen := choice.select(Path(trainer.default_local_dir)).chosen) is not None:
            return chosen.step
    return None


def _restore(trainer: TrainerConfig, storage: Storage, held: MirrorState) -> Manifest:
    """Download the first candidate whose files are all intact, and return its manifest.

    Raises `NoUsableCheckpointError` if there is none, `ResumableError` if the storage fails.
    """
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "disable":
        raise ConfigError(
            f"trainer.resume_mode=disable, but '{storage.url}' holds checkpoints up to step "
            f"{max(held.steps)}, which are never overwritten.\n"
            f"Fix: continue with trainer.resume_mode=auto, or choose a new "
            f"trainer.experiment_name and {KEY}"
        )
    problems = [f"step {step}: {reason}" for step, reason in held.incomplete.items()]
    try:
        fsio.make_dirs(run_dir)
        with RunLock(run_dir, needs_flock=trainer.checkpoint.require_lock):
            for manifest in held.candidates:
                layout.clean_leftovers(run_dir)  # left by the previous candidate
                try:
                    _take(run_dir, storage, manifest)
                    return manifest
                except _DamagedError as error:
                    problems.append(f"step {manifest.step}: {error}")
                    logger.warning("skipped step %d of %s: %s", manifest.step, storage.url, error)
    except StorageError as error:
        raise ResumableError(f"{error}; run the same command to try again") from error
    except CannotWriteError:
        raise
    except OSError as error:
        raise choice.cannot_use(run_dir, error) from error
    raise NoUsableCheckpointError(
        "\n  ".join([f"cannot resume from any checkpoint in '{storage.url}':", *problems])
        + f"\nFix: repair a checkpoint in the mirror, or start over with a new trainer.experiment_name and {KEY}"
    )


def _take(run_dir: Path, storage: Storage, manifest: Manifest) -> None:
    """Download a checkpoint and commit it like a save. Raises `_DamagedError`.

    Files are hashed as they arrive. Logs are restored before the commit, because a run directory
    with a checkpoint is never restored again. The manifest is written last, as in a save.
    """
    started = time.monotonic()
    place = layout.step_dir_name(manifest.step)
    logger.info("downloading %s (%s) from %s", place, readable(manifest.size_bytes), storage.url)
    retention.require_space(run_dir, manifest.size_bytes)
    staging = layout.staging_dir(run_dir, manifest.step)

    def fetch(record: FileRecord) -> None:
        path = staging / record.path
        fsio.make_dirs(path.parent)
        for _ in range(NUM_READS):
            if _fetched(storage, place, path, staging) == record:
                return
            fsio.unlink(path)
        raise _DamagedError(f"{record.path} differs from the saved file")

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(fetch, manifest.files))
    _take_logs(storage, place, staging, run_dir)
    fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
    fsio.fsync_tree(staging)
    layout.commit(staging, manifest.step, nonce=manifest.nonce)
    layout.publish(run_dir, manifest.step)
    logger.info("restored %s in %.1f s, every file verified", place, time.monotonic() - started)


def _fetched(
    storage: Storage,
    place: str,
    path: Path,
    staging: Path,
) -> FileRecord:
    """Download a file to `path`. Raises `_DamagedError` if it is missing."""
    try:
        with fsio.HashingFile(path, root=staging) as file:
            storage.fetch(f"{place}/{path.relative_to(staging).as_posix()}", file)
    except StorageError as error:
        if error.is_refusal:
            raise _DamagedError(str(error)) from error
        raise
    return file.record


def _take_logs(
    storage: Storage,
    place: str,
    staging: Path,
    run_dir: Path,
) -> None:
    """Restore the logs and identity of the run, except files that the run directory already has."""
    problem = None
    for name in (NEWER_FILES, RUN_FILES, RUN_FILES):
        archive = staging / name
        try:
            _fetched(storage, place, archive, staging)
            return _unpack(archive, run_dir)
        except (_DamagedError, tarfile.TarError, OSError, EOFError, zlib.error) as error:
            problem = error
        finally:
            archive.unlink(missing_ok=True)
    logger.warning(
        "cannot read %s (%s): the training state was restored, but logs and trackers start over",
        *(RUN_FILES, problem),
    )


def _unpack(archive: Path, run_dir: Path) -> None:
    """Unpack the known logs next to the archive, then move those that the run directory lacks.

    Raises `tarfile.TarError` for an archive that unpacks to more bytes than logs can have.
    """
    unpacked = archive.with_name("logs")
    limit_bytes = max(MIN_UNPACKED_BYTES, MAX_RATIO * archive.stat().st_size)
    num_bytes = 0

    def accept(member: tarfile.TarInfo, directory: str) -> tarfile.TarInfo | None:
        nonlocal num_bytes
        num_bytes += tarfile.BLOCKSIZE + member.size
        if num_bytes > limit_bytes:  # raised before the member's data is read
            raise tarfile.ReadError(f"it unpacks to more than {readable(limit_bytes)}")
        is_log = member.name.split("/")[0] in TRAVELS
        is_plain = member.isfile() or member.isdir()
        return tarfile.data_filter(member, directory) if is_log and is_plain else None

    try:
        with tarfile.open(archive, mode="r:gz") as opened:
            opened.extractall(unpacked, filter=accept)
        for path in unpacked.iterdir():
            if not (run_dir / path.name).exists():
                fsio.rename(path, run_dir / path.name)
    finally:
        if unpacked.exists():
            fsio.remove_tree(unpacked)
