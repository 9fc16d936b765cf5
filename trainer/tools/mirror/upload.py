"""Updates a mirror to the contents of a run directory.

An upload may stop at any point without harm. The same process then continues with the files that it
has not sent yet; another process starts over. `Uploader.sync` does the following:

1. Lock out other uploaders of the run directory. Check that the mirror belongs to this run, and
   that no other process has begun to upload to it.
2. Replace the logs of a checkpoint in the mirror, if there are new results.
3. Upload the missing checkpoints, the pointer's first. The mirror's pointer moves before its files
   are sent. Once the mirror lists logs and files with the right sizes, the manifest commits them.
4. Once the mirror lists the pointer's checkpoint as complete, remove old checkpoints.
"""

import os
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from trainer.checkpoint import fsio, layout, retention, rollback
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.layout import POINTER, CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST, Manifest
from trainer.checkpoint.reading import pinned
from trainer.checkpoint.storage import Storage, StorageError
from trainer.config import ConfigError, TrainerConfig
from trainer.runtime import evaluations
from trainer.runtime.files import regular_opener, try_lock
from trainer.runtime.json_lines import read_object
from trainer.runtime.progress import History
from trainer.tools.mirror import STATE
from trainer.tools.mirror.contents import (
    NEWER_FILES,
    RUN_FILES,
    MirrorState,
    claim,
    look,
    note,
    take_over,
    uploader_of,
)
from trainer.tracking import events_file, metrics_file, row_losses, run_info
from trainer.tracking.events_file import Event

PROOFS = "proofs"
TRAVELS = (
    run_info.FILE_NAME,
    metrics_file.FILE_NAME,
    events_file.FILE_NAME,
    row_losses.FILE_NAME,
    rollback.FILE,
    evaluations.FILE_NAME,
    PROOFS,
)
"""Files of the run directory that are uploaded with each checkpoint. All other files can be derived
from these, or are useful only on one machine.
"""
NUM_KEPT = 2
"""Number of newest checkpoints to keep in a mirror. The best checkpoint is kept too."""
NUM_STREAMS = 4
LOCK = ".mirror.lock"
"""A file in the run directory that the uploading process locks."""


class Uploader:
    """Uploads a run directory's checkpoints: the one that the pointer names, and the best ones.

    After a failure, the next `sync` continues.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        storage: Storage,
        *,
        record: Callable[[Event], object] = lambda event: None,
    ) -> None:
        """`record` is called with an event for each complete upload."""
        self._trainer = trainer
        self._storage = storage
        self._record = record
        self._run_dir = Path(trainer.default_local_dir)
        self._seen: object = None
        place = f"{socket.gethostname()}:{self._run_dir.absolute()}"
        self._process = f"{place}, since {datetime.now(UTC).isoformat()}"
        self._has_begun = False
        self._begun: Manifest | None = None
        self._sent: set[str] = set()

    @property
    def is_behind(self) -> bool:
        """True if the run directory has changed since the last `sync`. Does not contact the
        storage.
        """
        return self._local_state() != self._seen

    def sync(self) -> None:
        """Bring the mirror up to date. Does nothing until the run directory has a pointer.

        Raises `StorageError`, `OSError` for a fault in the run directory, or `ConfigError` if the
        mirror belongs to a different run. That is checked each time: the mirror may have vanished,
        and another run may have taken its place, or another machine may have continued this run.
        """
        state = self._local_state()
        if layout.read_pointer(self._run_dir).step is None:
            return  # rank 0 may not even have made the directory yet
        try:
            with _alone(self._run_dir):
                claim(self._trainer, self._storage)
                self._require_uploader()
                self._bring_up()
        except Exception as error:
            note(self._run_dir, self._storage, failed=str(error))
            raise
        self._seen = state

    def _require_uploader(self) -> None:
        """Take over the mirror when this process begins to upload. Raises `ConfigError` if another
        process has taken it over since then.
        """
        process = uploader_of(self._storage)
        if self._has_begun and process not in (None, self._process):
            raise ConfigError(
                f"another process of the same run uploads to '{self._storage.url}': {process}.\n"
                f"Fix: stop one of the two, or give each run its own mirror"
            )
        if process != self._process:
            take_over(self._storage, self._process)
        self._has_begun = True

    def _local_state(self) -> object:
        """Return all values that determine which checkpoints belong in the mirror."""
        return (
            {layout.parse_step(name) for name in fsio.list_dir(self._run_dir)},
            layout.read_pointer(self._run_dir),
            self._results(),
        )

    def _results(self) -> str:
        """Return a digest of the logs that can change without a new checkpoint; "" if there are
        none.
        """
        proofs = sorted((self._run_dir / PROOFS).glob("*"))
        found = (
            rollback.read(self._run_dir).entries,
            evaluations.read_summaries(self._run_dir),
            [(path.name, path.lstat().st_mtime_ns) for path in proofs],
        )
        return sha256(repr(found).encode()).hexdigest() if any(found) else ""

    def _bring_up(self) -> None:
        """Upload the missing checkpoints, the pointer's checkpoint first, then remove old ones.

        A best checkpoint that is damaged on the local disk is skipped, and its error is raised at
        the end.
        """
        results = self._results()
        local = {info.step: info for info in layout.committed(self._run_dir)}
        pointer = layout.read_pointer(self._run_dir).step
        if pointer is None or pointer not in local or self._is_discarded(local[pointer].manifest):
            return  # without a checkpoint, or in the middle of a rollback
        held = look(self._storage)
        problem = None
        wanted = [pointer, *sorted(self._best(list(local.values())) - {pointer}, reverse=True)]
        same = {step for step, info in local.items() if held.whole.get(step) == info.manifest}
        due = [step for step in wanted if step not in same]
        base = max((step for step in same if step <= pointer), default=None)
        noted = read_object(self._run_dir / STATE).get("results", "")
        if base is not None and (results != noted or base == pointer != held.pointer):
            self._renew_logs(local[base].manifest)
        if held.pointer != pointer and pointer not in due:
            self._point(pointer)
        for step in due:
            try:
                self._upload(local[step], held, moves_pointer=step == pointer != held.pointer)
            except OSError as error:
                if step == pointer:
                    raise
                problem = error
        held = look(self._storage)
        discarded = rollback.read(self._run_dir).discarded_nonces
        if layout.read_pointer(self._run_dir).step != pointer or local[pointer].nonce in discarded:
            return  # the run has saved or rolled back in the meantime
        if pointer not in held.whole or held.pointer != pointer:
            raise StorageError(
                f"{self._storage.url} does not list step {pointer} yet, although it was uploaded"
            )
        steps = self._rotate(held, pointer, discarded)
        note(
            self._run_dir,
            self._storage,
            steps=steps,
            failed="",
            results=results,
        )
        if problem is not None:
            raise problem

    def _upload(
        self,
        info: CheckpointInfo,
        held: MirrorState,
        *,
        moves_pointer: bool,
    ) -> None:
        """Send the files, then the manifest. First remove files that another process uploaded."""
        started = time.monotonic()
        manifest = info.manifest
        place = layout.step_dir_name(info.step)
        with pinned(info, *(record.path for record in manifest.files)) as directory:
            if directory is None:
                return
            with packed(self._run_dir) as archive:
                if self._is_discarded(manifest):
                    return
                if self._begun != manifest:
                    if info.step in held.steps:  # files from before a rollback, for example
                        self._storage.remove_tree(place)
                    self._begun = manifest
                    self._sent = set()
                if moves_pointer:  # done first, so later checkpoints in the mirror no longer count
                    self._point(info.step)
                self._storage.put(archive, f"{place}/{RUN_FILES}")
                logs = FileRecord(RUN_FILES, archive.stat().st_size, "")
                with ThreadPoolExecutor(NUM_STREAMS) as pool:
                    list(pool.map(lambda file: self._send(place, directory, file), manifest.files))
                self._require_whole(place, [logs, *manifest.files])
                self._storage.put(directory / MANIFEST, f"{place}/{MANIFEST}")
        self._begun = None
        fields = {
            "size_bytes": manifest.size_bytes,
            "duration_s": round(time.monotonic() - started, 3),
        }
        text = f"step {info.step} is in {self._storage.url}"
        self._record(Event("mirror", info.step, text, fields=fields))

    def _is_discarded(self, manifest: Manifest) -> bool:
        """Return True if a rollback has discarded the checkpoint.

        Ask this once the logs are packed: they must not contain such a rollback. A run that is
        restored from the checkpoint would try to complete it, without the rollback's target.
        """
        return manifest.nonce in rollback.read(self._run_dir).discarded_nonces

    def _renew_logs(self, manifest: Manifest) -> None:
        """Replace the logs of a checkpoint in the mirror. At least one archive is complete at all
        times.
        """
        place = layout.step_dir_name(manifest.step)
        with packed(self._run_dir) as archive:
            if self._is_discarded(manifest):
                return
            for name in (NEWER_FILES, RUN_FILES):
                self._storage.put(archive, f"{place}/{name}")
                self._require_whole(place, [FileRecord(name, archive.stat().st_size, "")])

    def _point(self, step: int) -> None:
        """Point the mirror's pointer to `step`."""
        self._storage.write(POINTER, f"{step}\n".encode())

    def _send(
        self,
        place: str,
        directory: Path,
        record: FileRecord,
    ) -> None:
        """Send a file unless this upload has already sent it. Raises `OSError` if it is damaged."""
        if record.path in self._sent:
            return
        path = directory / record.path
        if fsio.sha256_of(path) != record.sha256:
            raise OSError(f"{path} changed after it was written, so it is not uploaded")
        self._storage.put(path, f"{place}/{record.path}")
        self._sent.add(record.path)

    def _require_whole(self, place: str, records: list[FileRecord]) -> None:
        """Raise `StorageError` unless the mirror lists every file with its size."""
        sizes = self._storage.sizes()
        for record in records:
            name = f"{place}/{record.path}"
            if sizes.get(name) != record.size_bytes:
                self._sent.discard(record.path)
                raise StorageError(
                    f"{name} has {sizes.get(name, 0)} bytes in storage, but {record.size_bytes} were sent"
                )

    def _rotate(
        self,
        held: MirrorState,
        pointer: int,
        discarded: frozenset[str],
    ) -> list[int]:
        """Remove old, incomplete and rolled-back checkpoints, and return the remaining steps.

        Call this once the pointer's checkpoint is complete in the mirror.
        """
        undone = {step for step, manifest in held.whole.items() if manifest.nonce in discarded}
        whole = sorted(held.whole.keys() - undone)
        found = [CheckpointInfo(step, Path(), manifest=held.whole[step]) for step in whole]
        kept = {*self._best(found), *retention.newest(whole, NUM_KEPT, pointer)}
        for step in sorted(held.steps - kept):
            if step < whole[-1] or step in undone:
                self._storage.remove_tree(layout.step_dir_name(step))
        return sorted(kept)

    def _best(self, found: list[CheckpointInfo]) -> set[int]:
        """Return the steps that rotation keeps even if they are old."""
        log = self._run_dir / metrics_file.FILE_NAME
        rows = metrics_file.read_rows(log) if log.exists() else ()
        best_steps = [row.data["val/best_step"] for row in rows if "val/best_step" in row.data]
        history = History(int(best_steps[-1]) if best_steps else None)
        return retention.worth_keeping(self._run_dir, history, found)


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Lock out other uploaders of this run, which would remove this uploader's unfinished files.

    Raises `StorageError` if another process is uploading.
    """
    opener = regular_opener(os.O_RDWR | os.O_CREAT, follow_links=False)
    descriptor = opener(str(run_dir / LOCK), 0)
    try:
        if try_lock(descriptor) is None:
            raise StorageError(f"another process is uploading '{run_dir}'")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def packed(run_dir: Path) -> Iterator[Path]:
    """Pack the run's logs into a temporary archive.

    Rows after the checkpoint are harmless: the next attempt logs the step from which it continues,
    so readers skip them.
    """
    path = run_dir / f"{STATE}.{RUN_FILES}"
    try:
        with tarfile.open(path, mode="w:gz", compresslevel=1) as archive:
            for name in TRAVELS:
                if (run_dir / name).is_dir() or (run_dir / name).is_file():
                    archive.add(run_dir / name, name)
        yield path
    finally:
        path.unlink(missing_ok=True)
