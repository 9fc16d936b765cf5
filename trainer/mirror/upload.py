"""Brings a mirror up to what a run directory holds; ends anywhere without harm, and begins anew
(floor 3, no torch).
"""

import json
import math
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from trainer.checkpoint import fsio, layout, retention, rollback
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.layout import POINTER, CheckpointInfo
from trainer.checkpoint.manifest import MANIFEST, Manifest
from trainer.checkpoint.reading import pinned
from trainer.config import TrainerConfig
from trainer.mirror import STATE
from trainer.mirror.contents import HF_MODEL, RUN_FILES, MirrorState, look, mirrored
from trainer.mirror.storage import Storage, StorageError
from trainer.progress import History
from trainer.runtime import evaluations
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import read_object
from trainer.tracking import events_file, metrics_file, run_info

TRAVELS = (
    *(
        run_info.FILE_NAME,
        metrics_file.FILE_NAME,
        events_file.FILE_NAME,
        rollback.FILE,
        evaluations.FILE_NAME,
    ),
    *("evidence", "proofs"),
)
"""Of the run directory, beside a checkpoint: all else is made from these again, or belongs to a
machine.
"""
NUM_STREAMS = 4

Uploaded = Callable[[int, int, float], None]
"""Takes step, bytes and seconds of a checkpoint that is whole in the mirror now."""


class Uploader:
    """Of one run directory, one at a time. Only what the run's pointer has named goes up, and
    what is best.
    """

    def __init__(
        self, trainer: TrainerConfig, storage: Storage, *, tell: Uploaded | None = None
    ) -> None:
        self._run_dir, self._trainer = Path(trainer.default_local_dir), trainer
        self._storage, self._tell = storage, tell
        self._contents = trainer.checkpoint.mirror_contents
        self._seen: object = None
        self._history = History(None)
        self._begun: tuple[int, str] | None = None
        self._sent: set[str] = set()

    @property
    def is_behind(self) -> bool:
        """Whether the run directory has changed since the last `sync`; asks nothing of the
        storage.
        """
        return self._local_state() != self._seen

    def sync(self) -> None:
        """Raises `StorageError`, or `OSError` of the run directory: call it again later."""
        state = self._local_state()
        try:
            self._sync()
        except Exception as error:
            before = read_object(self._run_dir / STATE)
            self._note(before.get("pointer"), before.get("steps", []), str(error))
            raise
        self._seen = state

    def _local_state(self) -> object:
        names = [
            name for name in fsio.list_dir(self._run_dir) if layout.parse_step(name) is not None
        ]
        scores = rollback.scores(self._run_dir, self._trainer.best_metric)
        return names, layout.read_pointer(self._run_dir), rollback.read(self._run_dir), scores

    def _sync(self) -> None:
        pointer, local = layout.read_pointer(self._run_dir).step, layout.committed(self._run_dir)
        if pointer is None or pointer not in [info.step for info in local]:
            return
        self._history = _history(self._run_dir)
        self._bring_up(pointer, local)

    def _bring_up(self, pointer: int, local: list[CheckpointInfo]) -> None:
        """The storage holds these in the end, and nothing that is not to stay."""
        held, problem = self._look(), None
        worth = {pointer, *self._worth_keeping(local)}
        due = [i for i in local if i.step in worth and held.whole.get(i.step) != i.manifest]
        due.sort(key=lambda info: (info.step != pointer, -info.step))
        if held.pointer != pointer and pointer not in [info.step for info in due]:
            self._point(pointer)
        for info in due:
            try:
                self._upload(info, held, names_it=info.step == pointer != held.pointer)
            # of an old one, whose files changed: nothing else waits for it
            except OSError as error:
                if info.step == pointer:
                    raise
                problem = error
        held = self._look()
        if layout.read_pointer(self._run_dir).step != pointer:
            return
        if pointer not in held.whole or held.pointer != pointer:
            raise StorageError(
                f"{self._storage.url} does not show step {pointer} yet, although it was written"
            )
        self._note(pointer, self._rotate(held, pointer))
        if problem is not None:
            raise problem

    def _look(self) -> MirrorState:
        return look(self._storage, self._contents)

    def _upload(self, info: CheckpointInfo, held: MirrorState, *, names_it: bool = False) -> None:
        """Files, then the manifest. What another process began is written anew: who knows how
        far it came.
        """
        assert info.manifest is not None, "it is committed"
        started, manifest = time.monotonic(), info.manifest
        records, title = mirrored(manifest, self._contents), f"step {info.step} ({manifest.nonce})"
        logs = nullcontext() if self._contents == HF_MODEL else packed(self._run_dir)
        with pinned(info, *(record.path for record in records), may_copy=False) as directory:
            if directory is None:
                return
            with logs as archive, self._storage.as_one(title):
                if self._begun != (info.step, manifest.nonce):
                    # before it is pointed to: another of this step is of a past undone
                    self._clear(manifest, held)
                    self._begun, self._sent = (info.step, manifest.nonce), set()
                if names_it:  # before its checkpoint: what came after it elsewhere no longer counts
                    self._point(info.step)
                beside = list[FileRecord]()
                if archive is not None:
                    self._storage.put(archive, self._name(info.step, RUN_FILES))
                    beside = [FileRecord(RUN_FILES, archive.stat().st_size, "")]
                with ThreadPoolExecutor(NUM_STREAMS) as pool:
                    list(pool.map(lambda record: self._send(info.step, directory, record), records))
                self._require_whole(info.step, [*beside, *records])
                self._storage.put(directory / MANIFEST, self._name(info.step, MANIFEST))
        self._begun = None
        if self._tell is not None:
            self._tell(
                info.step, sum(record.size_bytes for record in records), time.monotonic() - started
            )

    def _name(self, step: int, path: str) -> str:
        """Where a file of a checkpoint lies."""
        return f"{layout.step_dir_name(step)}/{path}"

    def _clear(self, manifest: Manifest, held: MirrorState) -> None:
        if manifest.step in held.steps:
            self._remove(manifest.step)

    def _point(self, step: int) -> None:
        self._storage.write(POINTER, f"{step}\n".encode())

    def _send(self, step: int, directory: Path, record: FileRecord) -> None:
        if record.path in self._sent:
            return
        path = directory / record.path
        if fsio.sha256_of(path) != record.sha256:
            raise OSError(f"{path} changed after it was written: it is not mirrored")
        self._storage.put(path, self._name(step, record.path))
        self._sent.add(record.path)

    def _require_whole(self, step: int, records: list[FileRecord]) -> None:
        sizes = self._storage.sizes()
        for record in records:
            if (found := sizes.get(name := self._name(step, record.path))) != record.size_bytes:
                self._sent.discard(record.path)
                there = "is not there" if found is None else f"has {found} bytes there"
                raise StorageError(f"{name} {there}, {record.size_bytes} were sent")

    def _rotate(self, held: MirrorState, pointer: int) -> list[int]:
        """Remove what a rollback discarded, old checkpoints, and what never became one, once the
        pointer's is whole and a way back for a machine that is lost; what stays.
        """
        discarded = {
            nonce for entry in rollback.read(self._run_dir).entries for nonce in entry.discarded
        }
        undone = {step for step, manifest in held.whole.items() if manifest.nonce in discarded}
        whole, keep = sorted(held.whole.keys() - undone), self._trainer.checkpoint.mirror_keep
        found = [CheckpointInfo(step, Path(), manifest=held.whole[step]) for step in whole]
        newest = whole if keep is None else retention.newest(whole, keep, pointer)
        kept = {*self._worth_keeping(found), *newest}
        for step in sorted(held.steps - kept):
            if step < whole[-1] or step in undone:
                with self._storage.as_one(f"step {step} goes"):
                    self._remove(step)
        return sorted(kept.intersection(whole))

    def _remove(self, step: int) -> None:
        self._storage.remove(self._name(step, MANIFEST))
        self._storage.remove(layout.step_dir_name(step), is_tree=True)

    def _worth_keeping(self, found: list[CheckpointInfo]) -> set[int]:
        return rollback.worth_keeping(
            self._run_dir, self._history, self._trainer.best_metric, found
        )

    def _note(self, pointer: int | None, steps: list[int], failed: str = "") -> None:
        with suppress(OSError):
            state = {"url": self._storage.url, "pointer": pointer, "steps": steps, "failed": failed}
            atomic_write(self._run_dir / STATE, json.dumps(state))


@contextmanager
def packed(run_dir: Path) -> Iterator[Path]:
    """What travels beside a checkpoint, in a file for that moment; the checksum of gzip proves it.
    Rows of later steps do no harm: the next attempt says where it goes on.
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


def _history(run_dir: Path) -> History:
    """Where the validation loss was lowest, as the run logged it."""
    path = run_dir / metrics_file.FILE_NAME
    rows = metrics_file.read_rows(path) if path.exists() else iter(())
    losses = [
        (row.data["val/loss"], row.step)
        for row in rows
        if row.kind == "val" and "val/loss" in row.data
    ]
    finite = [found for found in losses if math.isfinite(found[0])]
    return History(min(finite)[1] if finite else None)
