"""Plans the disk space that a run's checkpoints need, without reading weights.

The plan does not count untrained tensors that are only copied to the export, or copies in the run
directory.
"""

import math
from pathlib import Path

import torch

from trainer.checkpoint.model_files import companion_files
from trainer.config import Config
from trainer.tools.plan.memory import MemoryPlan


def shard_bytes(plan: MemoryPlan) -> int:
    """Return the size of all ranks' shards in a checkpoint."""
    return plan.saved_bytes * plan.job.num_ranks


def export_bytes(config: Config, plan: MemoryPlan) -> int:
    """Return the size of a checkpoint's `huggingface/`."""
    checkpoint = config.trainer.checkpoint
    companions = companion_files(Path(plan.job.design.source.path))
    size_bytes = sum(path.stat().st_size for path in companions)
    if not checkpoint.exports_weights:
        return size_bytes
    num_exported = plan.num_parameters
    if config.model.has_adapters:
        num_exported = plan.num_base
        if checkpoint.export_lora == "adapter":
            # an adapter holds a tied weight under both names
            named = plan.job.design.model.named_parameters(remove_duplicate=False)
            num_exported = sum(p.numel() for _, p in named if p.requires_grad)
    dtype: torch.dtype = getattr(torch, checkpoint.export_dtype)
    return size_bytes + num_exported * dtype.itemsize


def most_checkpoints(config: Config) -> int | None:
    """Return the largest number of checkpoints that exist at the same time: the kept ones plus the
    one being written. Return None if all are kept and the length of the run is unknown.
    """
    trainer = config.trainer
    limits = []
    if trainer.max_ckpt_to_keep is not None:
        limits.append(trainer.max_ckpt_to_keep + 1)
    if trainer.save_every is None and trainer.save_freq < 0:
        limits.append(1)
    elif trainer.save_every is None and trainer.total_training_steps is not None:
        limits.append(math.ceil(trainer.total_training_steps / trainer.save_freq))
    return min(limits, default=None)
