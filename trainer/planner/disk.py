"""What a run writes: checkpoints and prepared tokens, beside what is free (floor 5)."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint import fsio
from trainer.checkpoint.model_files import companion_files
from trainer.checkpoint.retention import bytes_to_come, existing_parent
from trainer.config import Config
from trainer.errors import DataError
from trainer.planner.memory_plan import MemoryPlan
from trainer.run.preflight import find_files


@dataclass(frozen=True)
class DiskPlan:
    """Bytes of one checkpoint (of its shards those of the optimizer, which the newest `keep_full` keep), how many there
    are at most (None: all are kept, of a run of unknown length), bytes of the prepared tokens (None without the files),
    and what is free where checkpoints go: on this machine.
    """

    shard_bytes: int
    optimizer_bytes: int
    export_bytes: int
    num_checkpoints: int | None
    keep_full: int | None
    token_bytes: int | None
    free_bytes: int

    @property
    def checkpoint_bytes(self) -> int:
        return self.shard_bytes + self.export_bytes

    def bytes_to_come(self, num_here: int) -> int:
        """Of so many checkpoints there are, until there are as many as there will be; of one at least."""
        number = max(num_here + 1, self.num_checkpoints or 1)
        one, optimizer = self.checkpoint_bytes, self.optimizer_bytes
        return bytes_to_come(num_here, number, one, optimizer_bytes=optimizer, keep_full=self.keep_full)


def plan_disk(config: Config, plan: MemoryPlan) -> DiskPlan:
    """Tensors that pass through untrained, and copies in the run directory, are not counted: no weights are read."""
    return DiskPlan(
        shard_bytes=plan.saved_bytes * plan.num_ranks,
        optimizer_bytes=plan.optimizer_bytes * plan.num_ranks,
        export_bytes=_export_bytes(config, plan),
        num_checkpoints=_num_checkpoints(config),
        keep_full=config.trainer.checkpoint.keep_full,
        token_bytes=_token_bytes(config),
        free_bytes=fsio.free_bytes(existing_parent(Path(config.trainer.default_local_dir))),
    )


def _export_bytes(config: Config, plan: MemoryPlan) -> int:
    kept = config.trainer.checkpoint
    found = sum(path.stat().st_size for path in companion_files(Path(plan.model_dir)))
    if "hf_model" not in kept.save_contents:
        return found
    num_exported = plan.num_parameters
    if config.model.has_adapters:
        whole = 0 if kept.export_lora == "adapter" else plan.num_parameters - plan.num_trained
        num_exported = whole + (0 if kept.export_lora == "merged" else plan.num_trained)
    dtype: torch.dtype = getattr(torch, kept.export_dtype)
    return found + num_exported * dtype.itemsize


def _num_checkpoints(config: Config) -> int | None:
    """Those kept and the one being written, or fewer in a short run."""
    steps, every, keep = config.trainer.total_training_steps, config.trainer.save_freq, config.trainer.max_ckpt_to_keep
    saved = 1 if every < 0 else None if steps is None else -(-steps // every)
    return min((number for number in (saved, None if keep is None else keep + 1) if number is not None), default=None)


def _token_bytes(config: Config) -> int | None:
    """An estimate: four bytes of text are about one token, which takes four. Nothing is fetched for it."""
    if "hf://" in f"{config.data.train_files} {config.data.val_files}":
        return None
    try:
        found = find_files(config)
    except DataError:
        return None
    paths = {path for _, files in (*found.train, *found.validation) for path in files}
    return sum(path.stat().st_size for path in paths)
