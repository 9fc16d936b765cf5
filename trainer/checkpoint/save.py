"""One save, from a snapshot to a committed checkpoint: the protocol between ranks, phase by phase.

A crash at any point leaves the older checkpoints unchanged, and the new one complete or absent.
After each phase, every rank reports a value or an error, and waits for the reports of all ranks:

1. `open`: the main rank checks the lock and the free space, and creates the staging directory.
2. `shards`: each rank writes its state. The main rank adds `data.pt`.
3. `export`: each rank writes its share of `huggingface/`, made from the shards of all ranks.
4. `ready`: no rank does anything. If it succeeds, all ranks know that all files are written.
5. `commit`: the main rank waits until it sees all files, writes the manifest, syncs everything,
   checks deadline and lock, and renames. Then it moves the pointer and deletes old checkpoints.

An error fails the save on all ranks. If a rank does not answer before `ready`, nothing has been
committed. In `commit`, and in `ready` on all but the main rank, a rank without an answer cannot
know the outcome. The run then ends (`UnresolvedSaveError`), and the next start looks at the disk.
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer.checkpoint import export, fsio, layout, retention, shards
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST, Manifest, TensorInfo
from trainer.checkpoint.snapshot import Snapshot
from trainer.config import CheckpointConfig
from trainer.errors import CannotWriteError
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.runtime import distributed
from trainer.runtime.distributed import World

GRACE_S = 10.0
"""The other ranks wait this much longer for an answer than the main rank does."""
MIN_TIMEOUT_S = 0.1
NO_ANSWER = "did not answer in time"
MIN_GROUP_TIMEOUT_S = 60.0
"""The shortest timeout of a group. Ranks begin to create a group at different times."""
VISIBLE_WITHIN_S = 60.0
UNDECIDED = ("ready", "commit")
"""Phases in which a rank that gets no answer cannot know whether the main rank commits."""


class SaveFailedError(RuntimeError):
    """All ranks abandoned the save. The message names the rank and the cause."""


class UnresolvedSaveError(SaveFailedError):
    """Some ranks did not answer in time, and the new checkpoint may or may not exist."""


class NoAnswerError(SaveFailedError):
    """Some ranks did not answer in time, so this rank does not know the outcome; other ranks may."""


@dataclass(eq=False)
class Agreement:
    """Exchanges the ranks' reports on each phase of a save, with a deadline.

    It uses a separate gloo group, so that a save can run in the background. If a rank is slow or
    gone, the others wait until the deadline but never hang. They then abandon the group, and
    `renew` creates a new one. Creating an `Agreement` is collective.
    """

    world: World
    timeout_s: float
    """The longest time that a save may take."""
    _group: dist.ProcessGroup | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Create a new group unless every rank still has one. Collective, in the training thread.

        After a late answer, some ranks may have abandoned the group while others did not.
        """
        num_without = torch.tensor(float(self._group is None))
        dist.all_reduce(num_without)
        if num_without == 0:
            return
        self._give_up()
        timeout_s = max(self.timeout_s, MIN_GROUP_TIMEOUT_S)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def agree(
        self,
        *,
        value: Any,
        error: str | None,
        deadline: float,
    ) -> list[Any]:
        """Report `value` or `error`, and return every rank's value in rank order.

        `deadline`: a `time.monotonic()` of this rank. Raises `SaveFailedError` on every rank if any
        rank reported an error, and `NoAnswerError` if a rank reported nothing by the main rank's
        deadline.
        """
        reports: list[Any] = [None] * self.world.size
        try:
            self._meet(deadline)
            dist.all_gather_object(reports, (value, error), self._group)
        except RuntimeError as failure:
            self._give_up()
            if isinstance(failure, NoAnswerError):
                raise
            raise NoAnswerError(f"a rank {NO_ANSWER}") from None
        errors = [
            f"rank {rank}: {error}" for rank, (_, error) in enumerate(reports) if error is not None
        ]
        if errors:
            raise SaveFailedError(errors[0])
        return [value for value, _ in reports]

    def _meet(self, deadline: float) -> None:
        """Wait for all ranks. At its deadline the main rank knows which rank is missing.

        The other ranks wait longer. If the main rank gives up, they stop waiting too.
        """
        remaining_s = deadline - time.monotonic()
        sign = torch.zeros(1)
        if not self.world.is_main:
            timeout = timedelta(seconds=max(MIN_TIMEOUT_S, remaining_s) + GRACE_S)
            dist.isend(sign, 0, self._group).wait(timeout)  # type: ignore[union-attr]
            dist.irecv(sign, 0, self._group).wait(timeout)  # type: ignore[union-attr]
            return
        others = range(1, self.world.size)
        coming = {rank: dist.irecv(sign.clone(), rank, self._group) for rank in others}
        for rank, work in coming.items():
            timeout = timedelta(seconds=max(MIN_TIMEOUT_S, deadline - time.monotonic()))
            try:
                work.wait(timeout)  # type: ignore[union-attr]
            except RuntimeError:
                raise NoAnswerError(f"rank {rank} {NO_ANSWER}") from None
        for rank in others:
            dist.send(sign, rank, self._group)

    def _give_up(self) -> None:
        """Close the connections, so that no rank waits for this one."""
        group = self._group
        self._group = None
        if group is not None:
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of one run. The constructor, `prepare` and `save` are collective.

    `save` uses a separate process group: each rank may call it in any thread, one save at a time.

    model: the sharded model; its weights are not read. keep: number of checkpoints to keep, None
    for all. lock: the run lock, on the main rank only. card: returns the model card, given measured
    values by name.
    """

    run_dir: Path
    model: PreTrainedModel
    world: World
    config: CheckpointConfig
    source: ExportSource
    keep: int | None
    fingerprints: Mapping[str, str]
    lock: RunLock | None
    card: Callable[[Mapping[str, object]], bytes] | None = None
    timeout_s: float = layout.SAVE_TIMEOUT_S
    _deadline: float = field(default=math.inf, init=False)
    _staging: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._agreement = Agreement(self.world, self.timeout_s)
        parameters = shards.saved_parameters(self.model)
        self._tensors = {
            name: TensorInfo(tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in parameters.items()
        }
        self.device = next(self.model.parameters()).device
        self._plan = export.plan_export(
            parameters,
            shards.weight_buffers(self.model),
            export.meta_copy(self.model),
            self.source,
            dtype=self.config.export_dtype,
            lora=self.config.export_lora,
            has_weights=self.config.exports_weights,
        )

    def keep_sources(self) -> None:
        """Copy the tensors that exports take from the model directory. Collective.

        After this, no save reads that directory. Raises `CannotWriteError` on all ranks if a copy
        cannot be made.
        """
        error = None
        try:
            self._plan = self._plan.with_copies(
                self.run_dir, share=(self.world.rank, self.world.size)
            )
        except OSError as failure:
            error = CannotWriteError(f"cannot copy tensors of the model: {failure}")
        for found in filter(None, distributed.gather(error)):
            raise found

    def size_bytes(self, state: Any) -> int:
        """Return the size of a checkpoint in bytes. `state`: the nested tensors of this rank."""
        return shards.num_bytes(state) * self.world.size + self._plan.num_bytes

    def prepare(self) -> None:
        """Prepare for a `save`. Call this before each one, in the training thread."""
        self._agreement.renew()

    def save(self, snapshot: Snapshot) -> int:
        """Write and commit a checkpoint, and return its size in bytes.

        Raises `SaveFailedError` on all ranks alike.
        """
        self._deadline = time.monotonic() + self.timeout_s
        try:
            staging = self.run_dir / self._together("open", lambda: self._open(snapshot))[0]
            written = self._together("shards", lambda: self._write_shards(staging, snapshot))
            shard_files = list(chain.from_iterable(written))
            exported = self._together(
                "export", lambda: self._write_export(staging, snapshot, shard_files)
            )
            records = [*shard_files, *chain.from_iterable(exported)]
            # If an error occurs before all ranks are ready, the save fails on every rank, because
            # the main rank has not committed yet.
            self._together("ready", lambda: None)
            sizes = self._together("commit", lambda: self._commit(staging, snapshot, records))
            return int(sizes[0])
        except SaveFailedError:
            # Remove only this run's directory: a run that has taken over may be writing.
            if self.world.is_main and self._staging is not None:
                with suppress(OSError):
                    fsio.remove_tree(self._staging)
            raise

    def _together(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank, wait for all ranks, and return their values in rank order.

        An error on any rank raises `SaveFailedError` on every rank.
        """
        fsio.phase(f"{phase}.begin")
        value = None
        error = None
        try:
            value = action()
        except Exception as failure:  # the other ranks wait for this report, whatever it is
            error = f"{type(failure).__name__}: {failure}"
        fsio.phase(f"{phase}.report")
        try:
            values = self._agreement.agree(
                value=value,
                error=error,
                deadline=self._deadline,
            )
        except NoAnswerError as failure:
            if error is not None:
                raise SaveFailedError(f"{failure}; rank {self.world.rank}: {error}") from None
            is_failed = phase not in UNDECIDED or (self.world.is_main and phase == "ready")
            if is_failed:
                raise
            reason = str(failure) if self.world.is_main else f"rank 0 {NO_ANSWER}"
            raise UnresolvedSaveError(reason) from None
        fsio.phase(f"{phase}.agreed")
        return values

    def _open(self, snapshot: Snapshot) -> str | None:
        """On the main rank, create the directory that all ranks write into, and return its name."""
        if not self.world.is_main:
            return None
        self.require_lock()
        layout.clean_leftovers(self.run_dir)
        retention.require_space(self.run_dir, self.size_bytes([snapshot.model, snapshot.optim]))
        self._staging = staging = layout.staging_dir(self.run_dir, snapshot.position.step)
        fsio.make_dir(staging)
        fsio.make_dir(staging / layout.HUGGINGFACE)
        return staging.name

    def _write_shards(self, staging: Path, snapshot: Snapshot) -> list[FileRecord]:
        size = self.world.size
        rank = self.world.rank
        contents = {
            layout.model_file(size, rank): snapshot.model,
            layout.optim_file(size, rank): snapshot.optim,
            layout.extra_file(size, rank): snapshot.extra,
        }
        if self.world.is_main:
            contents[layout.DATA] = snapshot.data
        return [
            shards.write_torch(staging / name, value, root=staging)
            for name, value in contents.items()
        ]

    def _write_export(
        self,
        staging: Path,
        snapshot: Snapshot,
        written: list[FileRecord],
    ) -> list[FileRecord]:
        """Write this rank's share of the exported weight files, made from the shards of all ranks.

        The main rank adds the other files.
        """
        world = self.world
        needed = [layout.model_file(world.size, rank) for rank in range(world.num_shards)]
        self._await_files(staging, [record for record in written if record.path in needed])
        saved = shards.Shards.read(staging, needed)
        target = staging / layout.HUGGINGFACE
        card = None
        if self.card is not None:
            measured = {
                "step": snapshot.position.step,
                "epoch": snapshot.position.epoch,
                "train/loss": snapshot.loss,
                "best validation at step": snapshot.history.best_step,
            }
            card = self.card(measured)
        share = (world.rank, world.size)
        buffers = snapshot.extra["buffers"]
        return export.write_export(self._plan, target, saved, buffers, share=share, card=card)

    def _commit(
        self,
        staging: Path,
        snapshot: Snapshot,
        records: list[FileRecord],
    ) -> int:
        """On the main rank, check all files, write the manifest and rename the directory."""
        if not self.world.is_main:
            return 0
        text = f'{{"FSDP_version": 2, "world_size": {self.world.size}}}\n'
        small_files = {layout.FSDP_CONFIG: text}
        if (adapter := self._plan.source.adapter) is not None:
            small_files[ADAPTER_CONFIG] = json.dumps(adapter.settings, indent=2)
        for name, text in small_files.items():
            records.append(fsio.write_file(staging / name, text.encode(), root=staging))
        self._await_files(staging, records)
        manifest = self._manifest(snapshot, records)
        fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
        fsio.fsync_tree(staging)
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the save took longer than {self.timeout_s:.0f} s")
        self.require_lock()
        layout.commit(staging, manifest.step, nonce=manifest.nonce)
        retention.settle(self.run_dir, manifest.step, keep=self.keep, history=snapshot.history)
        return manifest.size_bytes

    def _await_files(self, staging: Path, records: list[FileRecord]) -> None:
        """Wait until the files are visible, but no longer than the save may take.

        A late rank must not wait for files of a save that the other ranks have abandoned.
        """
        deadline = min(self._deadline, time.monotonic() + VISIBLE_WITHIN_S)
        fsio.await_files(staging, records, deadline=deadline)

    def _manifest(self, snapshot: Snapshot, records: list[FileRecord]) -> Manifest:
        whole = self._plan.source.whole
        return Manifest(
            **asdict(snapshot.position),
            world_size=self.world.size,
            mesh=self.world.mesh_sizes,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            nonce=secrets.token_hex(8),
            files=tuple(records),
            tensors=self._tensors,
            text_names=whole.text_names if whole else (),
            num_passed_through=len(self._plan.others),
            fingerprints=dict(self.fingerprints),
            loss=snapshot.loss,
            grad_norm=snapshot.grad_norm,
        )

    def require_lock(self) -> None:
        """Raise `CannotWriteError` on the main rank unless this run still owns its directory."""
        if self.lock is not None:
            self.lock.require()
