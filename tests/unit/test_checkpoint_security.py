"""Nothing in a checkpoint can run code or lead out of its directory."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fakes import save

from trainer.checkpoint import layout, shards
from trainer.checkpoint.manifest import (
    MANIFEST,
    parse_manifest,
    verify_files,
)
from trainer.checkpoint.shards import CorruptShardError, read_torch


class Canary:
    """Creates a file when a loader that runs code unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize(
    "name", [layout.model_file(2, 0), layout.optim_file(2, 1), layout.extra_file(2, 0), "data.pt"]
)
def test_a_pickle_that_runs_code_is_refused_by_name_and_not_run(tmp_path, name):
    torch.save({"weight": torch.zeros(2), "more": Canary(tmp_path / "canary")}, tmp_path / name)
    with pytest.raises(CorruptShardError, match=f"{name} is a pickle that would run code"):
        read_torch(tmp_path / name)
    assert not (tmp_path / "canary").exists()
    torch.load(tmp_path / name, weights_only=False)
    assert (tmp_path / "canary").exists(), "the canary would have sung"


def test_a_plain_pickle_is_refused(tmp_path):
    path = tmp_path / "data.pt"
    path.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(CorruptShardError, match=r"data\.pt"):
        read_torch(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("linked", ["", "data.pt", MANIFEST])
def test_no_link_to_or_in_a_checkpoint_is_followed(tmp_path, linked):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "global_step_1"
    (path / linked).rename(tmp_path / "elsewhere")
    (path / linked).symlink_to(tmp_path / "elsewhere")
    assert layout.inspect(path).status == "incomplete"


@pytest.mark.parametrize("linked", ["data.pt", "huggingface"])
def test_what_was_swapped_for_a_link_to_the_same_content_is_not_proven(tmp_path, linked):
    save(tmp_path, 1)
    path = tmp_path / "global_step_1"
    manifest = parse_manifest((path / MANIFEST).read_bytes())
    (path / linked).rename(tmp_path / linked)
    (path / linked).symlink_to(tmp_path / linked)
    assert verify_files(path, manifest) != []


def test_tensors_of_unknown_placement_are_refused(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "file")
    with pytest.raises(CorruptShardError, match="'weight' is not a sharded tensor"):
        shards.Shards.read(tmp_path, ["file"]).whole("weight")
