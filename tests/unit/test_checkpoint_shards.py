"""Pieces of tensors: permitted copies, and the memory of a state."""

import pytest
import torch

from trainer.checkpoint import shards
from trainer.checkpoint.shards import CorruptShardError
from trainer.config import ConfigError


def test_a_type_that_would_lose_digits_is_refused():
    """The error names the key with which the checkpoint can be continued."""
    saved = torch.zeros(5, dtype=torch.float16)
    live = torch.zeros(5, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"(?s)'weight' .*optim.state_dtype=float32"):
        shards.copy_slice([saved], live, "weight", "optim.state_dtype")


def test_another_shape_is_refused():
    with pytest.raises(CorruptShardError, match=r"'weight' was saved as \(4,\)"):
        shards.copy_slice([torch.zeros(4)], torch.zeros(5), "weight", "model.master_dtype")


def test_shared_memory_counts_once():
    weight = torch.zeros(10, 4)
    tied = {"embedding": weight, "head": weight}
    assert shards.num_bytes([tied, [torch.zeros(3, dtype=torch.int64)], 7]) == 160 + 24


def test_a_lack_of_memory_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    def lack(*arguments, **settings):
        raise MemoryError

    monkeypatch.setattr(torch, "load", lack)
    with pytest.raises(MemoryError):
        shards.read_torch(tmp_path / "data.pt")
