"""Nothing in a checkpoint can run code or point outside its directory."""

import os
import pickle

import pytest
import torch

from trainer.checkpoint import shards
from trainer.checkpoint.shards import CorruptShardError, read_torch


class Canary:
    """Creates a file when a loader that runs code unpickles it."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_runs_code_is_refused_by_name_and_not_run(tmp_path):
    path = tmp_path / "data.pt"
    torch.save({"weight": torch.zeros(2), "more": Canary(tmp_path / "canary")}, path)
    with pytest.raises(CorruptShardError, match=r"data\.pt contains a pickle that could run code"):
        read_torch(path)
    assert not (tmp_path / "canary").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "canary").exists(), "the canary would have sung"
    # neither is one that is no file of torch
    path.write_bytes(pickle.dumps(Canary(tmp_path / "another")))
    with pytest.raises(CorruptShardError, match=r"data\.pt"):
        read_torch(path)
    assert not (tmp_path / "another").exists()


def test_tensors_of_unknown_placement_are_refused(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "file")
    with pytest.raises(CorruptShardError, match="'weight' is not a sharded tensor"):
        shards.Shards.read(tmp_path, ["file"]).whole("weight")
