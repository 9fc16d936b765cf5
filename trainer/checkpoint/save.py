"""One save, from a snapshot to a committed checkpoint: the protocol between the ranks, in the order of its phases.

A crash at any point leaves the older checkpoints as they were and either nothing new or the new one whole.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.checkpoint import export, fsio, layout, rollback, shards, space
from trainer.checkpoint.board import Board, SaveFailedError
from trainer.checkpoint.export import ExportPlan, ExportSource
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST, Manifest
from trainer.checkpoint.snapshot import Snapshot
from trainer.runtime.distributed import World

VISIBLE_WITHIN_S = 60.0
PHASES = ("open", "shards", "export", "commit")


@dataclass(frozen=True)
class SaveSettings:
    """What all saves of a run share. `lock` is the main rank's."""

    run_dir: Path
    world: World
    board: Board
    source: ExportSource
    plan: ExportPlan
    class_name: str
    has_weights: bool
    """Whether `huggingface/` holds weights, and not only what stands beside them."""
    keep: int | None
    fingerprints: Mapping[str, str]
    lock: RunLock | None


class Save:
    """Collective, but without a process group: every rank calls `run`, in whatever thread, with its own snapshot."""

    def __init__(self, settings: SaveSettings, snapshot: Snapshot, *, number: int, timeout_s: float) -> None:
        """`number` counts the saves of this process, failed ones too: equal on all ranks."""
        self._settings, self._snapshot, self._number = settings, snapshot, number
        self._deadline = time.monotonic() + timeout_s
        self._world = settings.world
        self._staging: Path | None = None

    def run(self) -> int:
        """Write and commit; returns the size of the checkpoint in bytes, or raises `SaveFailedError`, on all ranks."""
        try:
            name = self._together("open", self._open)[0]
            self._staging = self._settings.run_dir / name
            self._forget_previous()
            own_shards = self._together("shards", self._write_shards)
            records = [record for written in own_shards for record in _records(written)]
            exported = self._together("export", lambda: self._write_export(records))
            records += [record for written in exported for record in _records(written)]
            size_bytes = self._together("commit", lambda: self._commit(records))[0]
        except SaveFailedError:
            self._clean_up()
            raise
        return int(size_bytes)

    def _together(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank and wait for all: their values, or the same error everywhere."""
        fsio.phase(f"{phase}.begin")
        value, error = None, None
        try:
            value = action()
        except Exception as failure:  # whatever it is, the other ranks wait for this report
            error = f"{type(failure).__name__}: {failure}"
        fsio.phase(f"{phase}.report")
        values = self._settings.board.agree(
            f"save {self._number}/{phase}", value=value, error=error, deadline=self._deadline
        )
        fsio.phase(f"{phase}.agreed")
        return values

    def _open(self) -> str | None:
        """Main rank: make room and the directories that all write into; their name."""
        if not self._world.is_main:
            return None
        run_dir = self._settings.run_dir
        self._require_lock()
        layout.clean_leftovers(run_dir)
        space.require_space(run_dir, self._size_estimate_bytes())
        staging = layout.staging_dir(run_dir, self._snapshot.position.step)
        fsio.make_dir(staging)
        fsio.make_dir(staging / layout.HUGGINGFACE)
        return staging.name

    def _size_estimate_bytes(self) -> int:
        own = shards.num_bytes([self._snapshot.model, self._snapshot.optim])
        return own * self._world.size + export.num_bytes(self._settings.plan) * self._settings.has_weights

    def _write_shards(self) -> list[dict[str, Any]]:
        snapshot, staging = self._snapshot, self._require_staging()
        size, rank = self._world.size, self._world.rank
        contents = {
            layout.model_file(size, rank): snapshot.model,
            layout.optim_file(size, rank): snapshot.optim,
            layout.extra_file(size, rank): snapshot.extra,
        }
        if self._world.is_main:
            contents[layout.DATA] = snapshot.data
        written = [shards.write_torch(staging / name, value, root=staging) for name, value in contents.items()]
        return [dataclasses.asdict(record) for record in written]

    def _write_export(self, written: list[FileRecord]) -> list[dict[str, Any]]:
        """This rank's share of the weights' files, read from all ranks' shards; the main rank adds what is beside."""
        settings, staging = self._settings, self._require_staging()
        target, records = staging / layout.HUGGINGFACE, []
        if settings.has_weights:
            num_shards = self._world.size // self._world.num_replicas
            needed = {layout.model_file(self._world.size, rank) for rank in range(num_shards)}
            models = [record for record in written if record.path in needed]
            fsio.await_files(staging, models, timeout_s=self._visible_within_s)
            reader = shards.ShardReader(
                staging,
                world_size=self._world.size,
                num_shards=num_shards,
                parameters=self._snapshot.tensors,
                buffers=self._snapshot.extra["buffers"],
            )
            share = (self._world.rank, self._world.size)
            records += export.write_weights(settings.plan, target, reader, share=share)
        if self._world.is_main:
            if settings.has_weights:
                records += export.write_index(settings.plan, target)
            records += export.write_companions(settings.plan, target, settings.source, class_name=settings.class_name)
        return [dataclasses.asdict(record) for record in records]

    def _commit(self, records: list[FileRecord]) -> int:
        """Main rank: prove that all files are here, write the manifest, and give the directory its name."""
        if not self._world.is_main:
            return 0
        staging, step = self._require_staging(), self._snapshot.position.step
        text = f'{{"FSDP_version": 2, "world_size": {self._world.size}}}\n'
        records = [*records, fsio.write_file(staging / layout.FSDP_CONFIG, text.encode(), root=staging)]
        fsio.await_files(staging, records, timeout_s=self._visible_within_s)
        manifest = self._manifest(records)
        fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
        fsio.fsync_tree(staging)
        if time.monotonic() > self._deadline:
            raise TimeoutError("the save took longer than trainer.checkpoint.save_timeout_s")
        self._require_lock()
        layout.commit(staging, step, nonce=manifest.nonce)
        run_dir, snapshot = self._settings.run_dir, self._snapshot
        worth = rollback.worth_keeping(run_dir, best_step=snapshot.best_step, episodes=snapshot.episodes)
        layout.settle(run_dir, step, keep=self._settings.keep, protect=worth)
        return sum(record.size_bytes for record in records)

    @property
    def _visible_within_s(self) -> float:
        """A rank that comes late must not wait for files of a save that the others gave up."""
        return max(0.0, min(VISIBLE_WITHIN_S, self._deadline - time.monotonic()))

    def _manifest(self, records: list[FileRecord]) -> Manifest:
        snapshot = self._snapshot
        return Manifest(
            step=snapshot.position.step,
            epoch=snapshot.position.epoch,
            samples_consumed=snapshot.position.samples_consumed,
            world_size=self._world.size,
            mesh=self._world.mesh_shape,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            nonce=secrets.token_hex(8),
            files=tuple(records),
            tensors=snapshot.tensors,
            param_names=tuple(snapshot.tensors),
            fingerprints=dict(self._settings.fingerprints),
            finite=True,
            loss=snapshot.loss,
            grad_norm=snapshot.grad_norm,
        )

    def _require_lock(self) -> None:
        """Raise `RuntimeError` unless this run still owns its directory."""
        lock = self._settings.lock
        if lock is not None and not lock.is_held():
            raise RuntimeError(lock.why_lost())

    def _require_staging(self) -> Path:
        assert self._staging is not None
        return self._staging

    def _forget_previous(self) -> None:
        if self._world.is_main:
            for phase in PHASES:
                self._settings.board.forget(f"save {self._number - 1}/{phase}")

    def _clean_up(self) -> None:
        """Main rank: free the space of a failed save; what cannot be removed now goes before the next save."""
        if self._world.is_main:
            layout.clean_leftovers(self._settings.run_dir)


def _records(written: list[dict[str, Any]]) -> list[FileRecord]:
    return [FileRecord(**record) for record in written]
