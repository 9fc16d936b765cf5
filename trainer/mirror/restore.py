"""Before a run: the mirror is its own, and an empty run directory takes its newest checkpoint
(floor 3, no torch).
"""

import json
import logging
import shutil
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
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError, ResumableError
from trainer.mirror.contents import HF_MODEL, RUN_FILES, MirrorState, look
from trainer.mirror.storage import KEY, Storage, StorageError, is_repository
from trainer.mirror.upload import NUM_STREAMS, TRAVELS
from trainer.runtime.text import readable
from trainer.tracking import run_info

RETRY_AFTER_S = (2.0, 10.0)
WHOLE = "all"
MIN_UNPACKED_BYTES, MAX_RATIO = 2**26, 100
"""What logs may unpack to: JSON lines compress 5 to 20 times, an archive made to fill the disk
1,000 times.
"""
NUM_READS = 2
"""Before what came counts as damaged: a connection may end early without an error."""

logger = logging.getLogger(__name__)


class _DamagedError(Exception):
    """What came is not what the manifest says."""


def prepare(
    trainer: TrainerConfig, storage: Storage, *, retry_after_s: tuple[float, ...] = RETRY_AFTER_S
) -> None:
    """Raises `ConfigError` for the mirror of another run, one that cannot be used or not be resumed
    from.

    A storage out of reach is only warned of where the run directory has a checkpoint; where it has
    none, nobody knows whether the run begins: `ResumableError`, so that no step is trained twice
    over one that was saved.
    """
    own, problem = _own_checkpoint(Path(trainer.default_local_dir))
    for pause_s in (*retry_after_s, None):
        try:
            _require_own(trainer, storage)
            held = look(storage, WHOLE)
            break
        except StorageError as error:
            if own is not None or error.is_refusal or pause_s is None:
                return unreachable(trainer, error)
            time.sleep(pause_s)
    if own is not None:
        _compare(own, held, storage.url)
    elif held.whole or held.incomplete:
        _restore(trainer, storage, held)
    elif problem is not None:
        raise problem


def unreachable(trainer: TrainerConfig, error: StorageError) -> None:
    """Warns where the run has a checkpoint of its own. Raises `ResumableError` or, for a
    refusal, `ConfigError`.
    """
    if _own_checkpoint(Path(trainer.default_local_dir))[0] is not None:
        logger.warning("%s; training goes on, uploads are tried again", error)
    elif error.is_refusal:
        raise ConfigError(f"{error}; mend that, or train without {KEY}") from error
    else:
        reason = "whether the run has checkpoints there is not known, and this machine has none"
        raise ResumableError(f"{error}; {reason}: try again, or train without {KEY}") from error


def _own_checkpoint(run_dir: Path) -> tuple[int | None, NoUsableCheckpointError | None]:
    """Step of what the run directory goes on from; what it has of no use."""
    try:
        chosen = choice.select(run_dir).chosen
    except NoUsableCheckpointError as error:
        return None, error
    return None if chosen is None else chosen.step, None


def _require_own(trainer: TrainerConfig, storage: Storage) -> None:
    """The first start writes down whose mirror it is, and so learns whether it can be written."""
    names = trainer.project_name, trainer.experiment_name
    text = storage.read(run_info.FILE_NAME)
    found = {}
    with suppress(ValueError):  # cut while it was written
        found = json.loads(text or b"{}")
    holder = found.get("project_name"), found.get("experiment_name")
    if None in holder:
        is_model = is_repository(storage.url) and trainer.checkpoint.mirror_contents == HF_MODEL
        if is_model and {"config.json", "adapter_config.json"} & storage.sizes().keys():
            raise ConfigError(
                f"'{storage.url}' holds a model already: give this run's exports a place of their "
                f"own"
            )
        identity = dict(zip(("project_name", "experiment_name"), names, strict=True))
        storage.write(run_info.FILE_NAME, (json.dumps(identity) + "\n").encode())
    elif holder != names:
        raise ConfigError(
            f"'{storage.url}' mirrors the run '{holder[1]}' of project '{holder[0]}', not "
            f"'{names[1]}' of '{names[0]}': give each run its own, "
            f"{KEY}=…/${{trainer.project_name}}/${{trainer.experiment_name}}"
        )


def _compare(own: int, held: MirrorState, url: str) -> None:
    newest = held.candidates[0].step if held.candidates else 0
    if newest > own:
        logger.warning(
            "%s holds step %d, this machine step %d: the run goes on from its own; to take the "
            "mirror's, stop and move the run directory away",
            *(url, newest, own),
        )


def _restore(trainer: TrainerConfig, storage: Storage, held: MirrorState) -> None:
    """The first candidate that proves to be whole becomes a checkpoint of the run directory, as
    a save makes one.
    """
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "disable":
        raise ConfigError(
            f"trainer.resume_mode=disable, but '{storage.url}' holds checkpoints up to step "
            f"{max(held.steps)}; they are not overwritten: use resume_mode=auto to continue, or "
            f"another trainer.experiment_name and {KEY}"
        )
    problems = [f"step {step}: {reason}" for step, reason in held.incomplete.items()]
    try:
        fsio.make_dirs(run_dir)
        with RunLock(run_dir, needs_flock=trainer.checkpoint.require_lock):
            for manifest in held.candidates:
                # of the candidate before this one too, whose room it may need
                layout.clean_leftovers(run_dir)
                name, started = layout.step_dir_name(manifest.step), time.monotonic()
                size = readable(sum(record.size_bytes for record in manifest.files))
                logger.info("taking %s (%s) from %s", name, size, storage.url)
                try:
                    _take(run_dir, storage, manifest)
                except _DamagedError as error:
                    problems.append(f"step {manifest.step}: {error}")
                    logger.warning(
                        "passed over step %d of %s: %s", manifest.step, storage.url, error
                    )
                    continue
                logger.info(
                    "took %s in %.1f s, every file as its manifest says",
                    name,
                    time.monotonic() - started,
                )
                return
    except StorageError as error:
        raise ResumableError(f"{error}; the same command tries again") from error
    except CannotWriteError:
        raise
    except OSError as error:
        raise choice.cannot_use(run_dir, error) from error
    raise NoUsableCheckpointError(
        "\n  ".join([f"'{storage.url}' holds checkpoints, but none to continue from:", *problems])
        + f"\nRestore one, or begin anew with another trainer.experiment_name and {KEY}"
    )


def _take(run_dir: Path, storage: Storage, manifest: Manifest) -> None:
    """Raises `_DamagedError` for what is not as the manifest says."""
    retention.require_space(run_dir, sum(record.size_bytes for record in manifest.files))
    place, staging = layout.step_dir_name(manifest.step), layout.staging_dir(run_dir, manifest.step)
    for directory in sorted(
        {(staging / record.path).parent for record in manifest.files} | {staging}
    ):
        fsio.make_dirs(directory)

    def fetch(record: FileRecord) -> None:
        for _ in range(NUM_READS):
            if _fetched(storage, place, staging / record.path, staging) == record:
                return
            fsio.unlink(staging / record.path)
        raise _DamagedError(f"{record.path} is not as it was written")

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(fetch, manifest.files))
    _take_run_files(storage, place, staging, run_dir)
    fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
    fsio.fsync_tree(staging)
    layout.commit(staging, manifest.step, nonce=manifest.nonce)
    layout.publish(run_dir, manifest.step)


def _fetched(storage: Storage, place: str, path: Path, staging: Path) -> FileRecord:
    """Raises `_DamagedError` for a file that is not there."""
    try:
        with fsio.HashingFile(path, root=staging) as file:
            storage.fetch(f"{place}/{path.relative_to(staging).as_posix()}", file)
    except StorageError as error:
        if error.is_refusal:
            raise _DamagedError(str(error)) from error
        raise
    return file.record


def _take_run_files(storage: Storage, place: str, staging: Path, run_dir: Path) -> None:
    """Logs and identity of the run; what the run directory has of them is as new."""
    problem: Exception | None = None
    for _ in range(NUM_READS):
        try:
            _fetched(storage, place, staging / RUN_FILES, staging)
            return _unpack(staging / RUN_FILES, run_dir)
        except (_DamagedError, tarfile.TarError, OSError, EOFError, zlib.error) as error:
            problem = error
        finally:
            (staging / RUN_FILES).unlink(missing_ok=True)
    logger.warning(
        "%s cannot be read (%s): logs and trackers begin anew, the state goes on",
        RUN_FILES,
        problem,
    )


def _unpack(archive: Path, run_dir: Path) -> None:
    """Read to its end before a name is given: its checksum stands there. What a kill leaves
    half-written goes with the directory of the archive; what a failure leaves is removed at once.

    Raises `tarfile.TarError` for an archive that unpacks to more than logs can.
    """
    limit_bytes, num_bytes = max(MIN_UNPACKED_BYTES, MAX_RATIO * archive.stat().st_size), 0
    partial = archive.with_name("partial")
    with tarfile.open(archive, mode="r:gz") as opened:
        while (member := opened.next()) is not None:
            num_bytes += tarfile.BLOCKSIZE + member.size
            if num_bytes > limit_bytes:
                raise tarfile.ReadError(f"it unpacks to more than {readable(limit_bytes)}")
        for member in opened.getmembers():
            path = run_dir / member.name
            is_log = (
                Path(member.name).parts[:1] in [(name,) for name in TRAVELS]
                and ".." not in path.parts
            )
            if not member.isfile() or not is_log or path.exists():
                continue
            fsio.make_dirs(path.parent)
            try:
                with open(partial, "wb") as file:
                    shutil.copyfileobj(opened.extractfile(member), file)  # type: ignore[arg-type]
                fsio.rename(partial, path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
