"""Saving and resuming a run: what is written in which order, and what all ranks must agree on.

A checkpoint appears by one rename after every rank reported success; nothing older is removed before.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.checkpoint import export, fsio, layout, shards
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import MANIFEST, Manifest, TensorInfo, verify_files
from trainer.config import CheckpointConfig, ConfigError
from trainer.protocols import CannotWriteError, Stateful
from trainer.runtime import seeding
from trainer.runtime.distributed import World

logger = logging.getLogger(__name__)
MAX_FAILED_SAVES = 3
T = TypeVar("T")


@dataclass(frozen=True)
class RunState:
    """Everything that survives a restart."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    train_batches: Stateful
    guard: Stateful
    tracking: Stateful | None
    """On the main rank only."""
    schedule: Mapping[str, Any]


class CheckpointManager:
    """Owns `<run_dir>/global_step_*` of one run. Methods are collective."""

    def __init__(
        self,
        run_dir: Path,
        *,
        world: World,
        config: CheckpointConfig,
        state: RunState,
        source: ExportSource,
        keep: int | None,
        lock: RunLock | None,
        fingerprints: Mapping[str, str],
    ) -> None:
        self.run_dir = run_dir
        self._world, self._config, self._state, self._source = world, config, state, source
        self._keep, self._lock, self._fingerprints = keep, lock, dict(fingerprints)
        self._num_failed_in_a_row = 0

    def save(self, step: int, *, loss: float, grad_norm: float, is_required: bool) -> bool:
        """Write `global_step_<step>` and rotate. Returns whether it was committed; a failure leaves the older ones.

        Raises `CannotWriteError` on every rank when the save `is_required` or has now failed three times in a row.
        """
        started = time.perf_counter()
        error = self._try_save(step, loss=loss, grad_norm=grad_norm)
        if error is None:
            self._num_failed_in_a_row = 0
            logger.info("saved %s (%.1f s)", self.run_dir / layout.step_dir_name(step), time.perf_counter() - started)
            return True
        self._num_failed_in_a_row += 1
        if is_required or self._num_failed_in_a_row >= MAX_FAILED_SAVES:
            raise CannotWriteError(f"checkpoint of step {step} failed: {error}")
        logger.warning("checkpoint of step %d failed, training goes on: %s", step, error)
        return False

    def _try_save(self, step: int, *, loss: float, grad_norm: float) -> str | None:
        if not self._is_finite():
            return "a parameter or moment is not finite; a poisoned state is never committed"
        staging, error = self._on_main(lambda: self._open_staging(step))
        if staging is None:
            return error
        records, error = self._write_all(staging, step)
        if error is None:
            _, error = self._on_main(lambda: self._commit(staging, step, records, loss=loss, grad_norm=grad_norm))
        if error is not None:
            self._on_main(lambda: fsio.remove_tree(staging))
        return error

    def _is_finite(self) -> bool:
        """Whether every parameter and moment of every rank is finite."""
        tensors = [p.detach() for p in self._state.model.parameters()]
        tensors += [v for s in self._state.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        bad = torch.stack([(~torch.isfinite(t)).any().to(self._world.device) for t in locals_ if t.numel()]).any()
        count = bad.double()
        dist.all_reduce(count)
        return count.item() == 0

    def _open_staging(self, step: int) -> Path:
        staging = layout.staging_dir(self.run_dir, step)
        fsio.make_dir(staging)
        return staging

    def _write_all(self, staging: Path, step: int) -> tuple[list[FileRecord], str | None]:
        """Every rank writes its shards, all gather the export; (all ranks' records, the first error)."""
        records: list[FileRecord] = []
        error: str | None = None
        try:
            records += self._write_shards(staging, step)
        except Exception as failure:  # whatever it is, the other ranks wait for this report
            error = f"rank {self._world.rank}: {failure}"
        try:
            records += self._write_export(staging)
        except Exception as failure:
            error = error or f"rank {self._world.rank}: {failure}"
        reports: list[Any] = [None] * self._world.size
        dist.all_gather_object(reports, (records, error))
        errors = [reported for _, reported in reports if reported is not None]
        return [record for written, _ in reports for record in written], errors[0] if errors else None

    def _write_shards(self, staging: Path, step: int) -> list[FileRecord]:
        size, rank = self._world.size, self._world.rank
        state = self._state
        extra = {
            "step": step,
            "lr_scheduler": {**state.schedule, "last_epoch": step},
            "rng": seeding.rng_state(),
            "guard": state.guard.state_dict(),
            "tracking": state.tracking.state_dict() if state.tracking is not None else {},
        }
        contents = {
            layout.model_file(size, rank): shards.model_state(state.model),
            layout.optim_file(size, rank): shards.optimizer_state(state.model, state.optimizer),
            layout.extra_file(size, rank): extra,
        }
        if self._world.is_main:
            contents["data.pt"] = state.train_batches.state_dict()
        return [shards.write_torch(staging / name, value, root=staging) for name, value in contents.items()]

    def _write_export(self, staging: Path) -> list[FileRecord]:
        dtype = getattr(torch, self._config.export_dtype)
        target = staging / export.DIRECTORY
        if "hf_model" in self._config.save_contents:
            is_writer = self._world.is_main
            return export.write_export(self._state.model, target, self._source, dtype=dtype, is_writer=is_writer)
        if self._world.is_main:
            return export.write_companions_only(self._state.model, target, self._source, dtype=dtype)
        return []

    def _commit(self, staging: Path, step: int, records: list[FileRecord], *, loss: float, grad_norm: float) -> None:
        """Main rank: fsdp_config.json, then the manifest, then the rename that makes the checkpoint exist."""
        world = self._world
        text = f'{{"FSDP_version": 2, "world_size": {world.size}}}\n'
        records = [*records, fsio.write_file(staging / "fsdp_config.json", text.encode(), root=staging)]
        for record in records:
            if fsio.size_within(staging, record.path) != record.size_bytes:
                raise OSError(f"{record.path} is not as long as the rank that wrote it reported")
        position = self._state.train_batches.state_dict()
        parameters = dict(self._state.model.named_parameters())
        manifest = Manifest(
            step=step,
            epoch=position["epoch"],
            samples_consumed=position["samples_consumed"],
            world_size=world.size,
            mesh=world.mesh_shape,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            nonce=secrets.token_hex(8),
            files=tuple(records),
            tensors={n: TensorInfo(tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in parameters.items()},
            param_names=tuple(parameters),
            fingerprints=self._fingerprints,
            finite=True,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        )
        fsio.write_file(staging / MANIFEST, manifest.to_json().encode(), root=staging)
        fsio.fsync_tree(staging)
        if self._lock is not None and not self._lock.is_held():
            raise OSError(f"another job has taken over {self.run_dir}")
        layout.commit(staging, step)
        layout.publish(self.run_dir, step)
        layout.rotate(self.run_dir, keep=self._keep)

    def resume(self, candidates: tuple[CheckpointInfo, ...]) -> Path | None:
        """Load the first candidate whose contents verify; returns its directory, or None without candidates.

        Raises `NoUsableCheckpointError` if none verifies, `ConfigError` if it belongs to another model or data.
        """
        for candidate in candidates:
            problems = self._verify(candidate)
            if not problems:
                self._load(candidate)
                if self._is_own(candidate):
                    self._on_main(partial(self._settle, candidate.step))
                return candidate.path
            logger.warning("%s is damaged: %s", candidate.path, "; ".join(problems[:3]))
            if self._is_own(candidate):
                self._on_main(partial(layout.quarantine, candidate.path, "its contents do not verify"))
        if candidates:
            raise layout.NoUsableCheckpointError(
                f"every checkpoint in {self.run_dir} is damaged (set aside as .corrupt_*); begin anew in another "
                f"directory: trainer.experiment_name=<new name>"
            )
        return None

    def _is_own(self, candidate: CheckpointInfo) -> bool:
        return candidate.path.resolve().parent == self.run_dir.resolve()

    def _settle(self, step: int) -> None:
        """Main rank: finish what a crash between commit and rotation left undone."""
        layout.publish(self.run_dir, step)
        layout.rotate(self.run_dir, keep=self._keep, protect={step})

    def _verify(self, candidate: CheckpointInfo) -> list[str]:
        if candidate.manifest is None:
            raise ConfigError(
                f"{candidate.path} was written by verl, without a manifest; continuing it is not supported: "
                f"train from its huggingface/ directory instead (model.partial_pretrain=...)"
            )
        own = verify_files(candidate.path, candidate.manifest, share=(self._world.rank, self._world.size))
        reports: list[Any] = [None] * self._world.size
        dist.all_gather_object(reports, own)
        return [problem for report in reports for problem in report]

    def _load(self, candidate: CheckpointInfo) -> None:
        manifest, state = candidate.manifest, self._state
        assert manifest is not None
        self._require_same_run(manifest)
        where: dict[str, Any] = {
            "world_size": manifest.world_size,
            "num_shards": manifest.mesh.get("fsdp", manifest.world_size),
        }
        shards.load_model(state.model, candidate.path, **where)
        if "optimizer" in self._config.load_contents:
            shards.load_optimizer(state.model, state.optimizer, candidate.path, **where)
        if "extra" not in self._config.load_contents:
            return
        is_same_size = manifest.world_size == self._world.size
        saved_rank = self._world.rank if is_same_size else 0
        extra = shards.read_torch(candidate.path / layout.extra_file(manifest.world_size, saved_rank))
        if changes := schedule_changes(extra["lr_scheduler"], state.schedule):
            logger.warning("the learning rate follows another schedule from here on: %s", changes)
        state.guard.load_state_dict(extra["guard"])
        if is_same_size:
            seeding.set_rng_state(extra["rng"])
        if state.tracking is not None:
            state.tracking.load_state_dict(extra["tracking"])
        try:
            state.train_batches.load_state_dict(shards.read_torch(candidate.path / "data.pt"))
        except ValueError as error:
            raise ConfigError(
                f"{candidate.path} was trained on other data or in another order: {error}. Restore the data and keys, "
                f"or begin anew: trainer.experiment_name=<new name>"
            ) from error

    def _require_same_run(self, manifest: Manifest) -> None:
        """Raise `ConfigError` naming every difference that would make the continued run another run."""
        changed = [
            f"{key}: saved {manifest.fingerprints[key]}, now {value}"
            for key, value in self._fingerprints.items()
            if manifest.fingerprints.get(key, value) != value
        ]
        if changed:
            raise ConfigError(
                f"the checkpoint of step {manifest.step} belongs to another run ({'; '.join(changed)}). Restore these, "
                f"or begin anew: trainer.experiment_name=<new name>"
            )

    def _on_main(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """Run `action` on the main rank and tell all ranks: (its value, its error)."""
        outcome: list[Any] = [None, None]
        if self._world.is_main:
            try:
                outcome[0] = action()
            except Exception as error:  # whatever it is, the other ranks wait for this answer
                outcome[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0)
        return outcome[0], outcome[1]


def schedule_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`key: saved -> now` for every key that differs, empty if none does."""
    return ", ".join(f"{key}: {saved.get(key)} -> {value}" for key, value in now.items() if saved.get(key) != value)
