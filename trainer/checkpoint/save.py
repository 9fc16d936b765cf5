"""One save, from a snapshot to a committed checkpoint: the protocol between the ranks, in the order of its phases.

A crash at any point leaves the older checkpoints as they were and either nothing new or the new one whole.
"""

import dataclasses
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from trainer.adapter_names import ADAPTER_CONFIG
from trainer.checkpoint import export, fsio, layout, retention, shards
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST, Manifest, TensorInfo
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.snapshot import Snapshot
from trainer.config import CheckpointConfig, ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.distributed import World
from trainer.runtime.processes import begun

GRACE_S = 10.0
"""How much longer than the main rank the others wait for its verdict, and it for them to have read it."""
NO_ANSWER = "gave no answer in time"


class SaveFailedError(RuntimeError):
    """The save was given up on all ranks alike; the message names rank and cause."""


class UnresolvedSaveError(SaveFailedError):
    """The main rank gave no answer in time: only this rank knows, and a checkpoint may or may not exist."""


class Board:
    """What ranks tell each other during a save: acknowledgements with a status and a deadline, instead of a barrier.

    They go through a key-value store of their own, hosted by the main rank, and not through a collective, so a save may
    run behind training, and a rank that is slow or gone costs a deadline, never a hang. Creating it is collective.
    """

    def __init__(self, world: World, *, grace_s: float = GRACE_S) -> None:
        self._world, self._grace_s = world, grace_s
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port: list[int] = [0]
        if world.is_main:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0)
        if not world.is_main:
            self._store = dist.TCPStore(host, port[0], is_master=False)

    def agree(self, topic: str, *, value: Any = None, error: str | None = None, deadline: float) -> list[Any]:
        """Report `value` (plain JSON) or `error`; returns every rank's value in rank order.

        `deadline` is a `time.monotonic()` of this rank. Raises `SaveFailedError` on every rank if any rank reported
        an error or, by the main rank's deadline, nothing.
        """
        report = json.dumps({"value": value, "error": error})
        if self._world.is_main:
            verdict = self._collect(topic, report, deadline)
            self._announce(topic, verdict)
        else:
            self._store.set(f"{topic}/{self._world.rank}", report)
            verdict = self._await_verdict(topic, deadline + self._grace_s)
            self._store.set(f"{topic}/read by {self._world.rank}", "")
        if verdict["error"] is not None:
            raise SaveFailedError(verdict["error"])
        return list(verdict["values"])

    def forget(self, topic: str) -> None:
        """Main rank: free what was said about a topic that every rank is done with."""
        ranks = range(1, self._world.size)
        for name in ("verdict", *ranks, *(f"read by {rank}" for rank in ranks)):
            self._store.delete_key(f"{topic}/{name}")

    def _collect(self, topic: str, own: str, deadline: float) -> dict[str, Any]:
        reports = [json.loads(own)]
        for rank in range(1, self._world.size):
            try:
                reports.append(json.loads(self._wait_for(f"{topic}/{rank}", deadline)))
            except dist.DistStoreError:
                reports.append({"value": None, "error": NO_ANSWER})
        errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
        silent = [rank for rank, report in enumerate(reports) if report["error"] == NO_ANSWER]
        values = [report["value"] for report in reports]
        return {"values": values, "error": errors[0] if errors else None, "silent": silent}

    def _announce(self, topic: str, verdict: dict[str, Any]) -> None:
        """Main rank: tell all, and stay until they have read it, for the store ends with this process."""
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        deadline = time.monotonic() + self._grace_s
        for rank in range(1, self._world.size):
            if rank not in verdict["silent"]:
                with suppress(dist.DistStoreError):
                    self._wait_for(f"{topic}/read by {rank}", deadline)

    def _await_verdict(self, topic: str, deadline: float) -> dict[str, Any]:
        """Asked for in a thread: torch's client waits for a store whose process is stopped without any limit."""
        asking = begun(lambda: self._wait_for(f"{topic}/verdict", deadline))
        try:
            verdict: dict[str, Any] = json.loads(asking.result(max(0.0, deadline - time.monotonic()) + 1.0))
        except (TimeoutError, dist.DistError):
            raise UnresolvedSaveError("rank 0 gave no answer in time") from None
        return verdict

    def _wait_for(self, key: str, deadline: float) -> bytes:
        self._store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        value: bytes = self._store.get(key)
        return value


VISIBLE_WITHIN_S = 60.0
PHASES = ("open", "shards", "export", "commit")


class Saver:
    """Writes the checkpoints of one run. Making it and `save` are collective; `save` needs no process group, so that
    every rank may call it in whatever thread, with a snapshot of its own, one at a time.
    """

    def __init__(
        self,
        run_dir: Path,
        model: PreTrainedModel,
        *,
        world: World,
        config: CheckpointConfig,
        source: ExportSource,
        kept: Retention,
        fingerprints: Mapping[str, str],
        lock: RunLock | None,
    ) -> None:
        """`model`: sharded, its weights are not read. `lock` is the main rank's."""
        self.run_dir, self.world, self.config, self.kept = run_dir, world, config, kept
        self._source, self.fingerprints, self._lock = source, fingerprints, lock
        self._board, self._number, self._deadline = Board(world), 0, math.inf
        self._staging: Path | None = None
        parameters = shards.saved_parameters(model)
        self._tensors = {
            name: TensorInfo(tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in parameters.items()
        }
        self.device = next(model.parameters()).device
        self._plans = export.plan_exports(model, parameters, source, dtype=config.export_dtype, lora=config.export_lora)
        self._has_weights = "hf_model" in config.save_contents

    @property
    def copied_bytes(self) -> int:
        """What `keep_sources` takes on the disk, over all ranks."""
        return export.copied_bytes(self._plans, has_weights=self._has_weights)

    def keep_sources(self) -> None:
        """Copy what exports take from the model directory, so that no save reads it. Collective.

        Raises `CannotWriteError` on all ranks alike if a copy cannot be made, `ConfigError` if a file cannot be read.
        """
        share = (self.world.rank, self.world.size)
        error: ConfigError | CannotWriteError | None = None
        try:
            self._plans = export.with_copies(self._plans, self.run_dir, share=share, has_weights=self._has_weights)
        except ConfigError as failure:
            error = failure
        except OSError as failure:
            error = CannotWriteError(f"'{self.run_dir}': tensors of the model cannot be copied there: {failure}")
        errors: list[Any] = [None] * self.world.size
        dist.all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                raise found

    def source_changes(self) -> list[str]:
        """How the model directory differs from what the run read at its start, each with the directory's name."""
        files = self._source.files
        return [f"{files.directory}: {change}" for change in files.changes()]

    def size_bytes(self, state: Any) -> int:
        """Of a checkpoint whose shards hold `state` (nested tensors) on this rank, and as much on the others."""
        exported = export.num_bytes(self._plans, has_weights=self._has_weights)
        return shards.num_bytes(state) * self.world.size + exported

    def save(self, snapshot: Snapshot) -> int:
        """Write and commit; returns the size of the checkpoint in bytes, or raises `SaveFailedError`, on all ranks."""
        self._number += 1
        self._deadline = time.monotonic() + self.config.save_timeout_s
        try:
            staging = self.run_dir / self._together("open", lambda: self._open(snapshot))[0]
            for phase in PHASES if self.world.is_main else ():
                self._board.forget(f"save {self._number - 1}/{phase}")
            shard_files = self._written("shards", lambda: self._write_shards(staging, snapshot))
            exported = self._written("export", lambda: self._write_export(staging, snapshot, shard_files))
            records = [*shard_files, *exported]
            return int(self._together("commit", lambda: self._commit(staging, snapshot, records))[0])
        except SaveFailedError:
            # its own alone: a run that has taken over may be writing; what stays goes before the next save
            if self.world.is_main and self._staging is not None:
                with suppress(OSError):
                    fsio.remove_tree(self._staging)
            raise

    def _together(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank and wait for all: their values, or the same error everywhere."""
        fsio.phase(f"{phase}.begin")
        value, error = None, None
        try:
            value = action()
        except Exception as failure:  # whatever it is, the other ranks wait for this report
            error = f"{type(failure).__name__}: {failure}"
        fsio.phase(f"{phase}.report")
        values = self._board.agree(f"save {self._number}/{phase}", value=value, error=error, deadline=self._deadline)
        fsio.phase(f"{phase}.agreed")
        return values

    def _written(self, phase: str, action: Callable[[], list[FileRecord]]) -> list[FileRecord]:
        """The same for an action that writes files: those of all ranks."""
        ranks = self._together(phase, lambda: [dataclasses.asdict(record) for record in action()])
        return [FileRecord(**record) for written in ranks for record in written]

    def _open(self, snapshot: Snapshot) -> str | None:
        """Main rank: make room and the directories that all write into; their name."""
        if not self.world.is_main:
            return None
        self.require_lock()
        layout.clean_leftovers(self.run_dir)
        retention.require_space(self.run_dir, self.size_bytes([snapshot.model, snapshot.optim]), self.kept)
        self._staging = staging = layout.staging_dir(self.run_dir, snapshot.position.step)
        fsio.make_dir(staging)
        for directory in ("", *filter(None, self._plans)):
            fsio.make_dir(staging / layout.HUGGINGFACE / directory)
        return staging.name

    def _write_shards(self, staging: Path, snapshot: Snapshot) -> list[FileRecord]:
        size, rank = self.world.size, self.world.rank
        contents = {
            layout.model_file(size, rank): snapshot.model,
            layout.optim_file(size, rank): snapshot.optim,
            layout.extra_file(size, rank): snapshot.extra,
        }
        if self.world.is_main:
            contents[layout.DATA] = snapshot.data
        return [shards.write_torch(staging / name, value, root=staging) for name, value in contents.items()]

    def _write_export(self, staging: Path, snapshot: Snapshot, written: list[FileRecord]) -> list[FileRecord]:
        """This rank's share of the weights' files, read from all ranks' shards; the main rank adds what is beside."""
        world = self.world
        needed = {layout.model_file(world.size, rank) for rank in range(world.num_shards)}
        self._await_files(staging, [record for record in written if record.path in needed])
        reader = shards.ShardReader(
            staging,
            world_size=world.size,
            num_shards=world.num_shards,
            parameters=self._tensors,
            buffers=snapshot.extra["buffers"],
        )
        return export.write_export(
            self._plans,
            staging / layout.HUGGINGFACE,
            reader,
            self._source,
            share=(world.rank, world.size),
            has_weights=self._has_weights,
        )

    def _commit(self, staging: Path, snapshot: Snapshot, records: list[FileRecord]) -> int:
        """Main rank: prove that all files are here, write the manifest, and give the directory its name."""
        if not self.world.is_main:
            return 0
        text = f'{{"FSDP_version": 2, "world_size": {self.world.size}}}\n'
        records = [*records, fsio.write_file(staging / layout.FSDP_CONFIG, text.encode(), root=staging)]
        if self._source.adapter is not None:
            settings = json.dumps(self._source.adapter.settings, indent=2).encode()
            records.append(fsio.write_file(staging / ADAPTER_CONFIG, settings, root=staging))
        self._await_files(staging, records)
        manifest = self._manifest(snapshot, records)
        fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
        fsio.fsync_tree(staging)
        if time.monotonic() > self._deadline:
            raise TimeoutError("the save took longer than trainer.checkpoint.save_timeout_s")
        self.require_lock()
        layout.commit(staging, manifest.step, nonce=manifest.nonce)
        retention.settle(self.run_dir, manifest.step, self.kept, history=snapshot.history)
        return sum(record.size_bytes for record in records)

    def _await_files(self, staging: Path, records: list[FileRecord]) -> None:
        """No longer than the save may take: a rank that comes late must not wait for what the others gave up."""
        timeout_s = max(0.0, min(VISIBLE_WITHIN_S, self._deadline - time.monotonic()))
        fsio.await_files(staging, records, timeout_s=timeout_s)

    def _manifest(self, snapshot: Snapshot, records: list[FileRecord]) -> Manifest:
        return Manifest(
            step=snapshot.position.step,
            epoch=snapshot.position.epoch,
            samples_consumed=snapshot.position.samples_consumed,
            world_size=self.world.size,
            mesh=self.world.mesh_sizes,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            nonce=secrets.token_hex(8),
            files=tuple(records),
            tensors=self._tensors,
            text_names=self._source.whole.text_names if self._source.whole else (),
            num_passed_through=len(self._plans[""].others),
            fingerprints=dict(self.fingerprints),
            loss=snapshot.loss,
            grad_norm=snapshot.grad_norm,
        )

    def require_lock(self) -> None:
        """Main rank: raise `CannotWriteError` unless this run still owns its directory."""
        if self._lock is not None and not self._lock.keep():
            raise CannotWriteError(self._lock.why_lost())
