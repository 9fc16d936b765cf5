"""The digest of weights from samples: the changes that it detects, and the small amount that it
reads.
"""

import os

import pytest
import torch
from safetensors.torch import save_file

from trainer.model import sampled_weights
from trainer.model.sampled_weights import digest_of_weights
from trainer.model.weight_files import weight_files

SHAPES = {"embed": (512, 64), "norm": (64,), "layers.0.up": (128, 64), "layers.1.up": (128, 64)}


def digest_of(directory):
    return digest_of_weights(weight_files(directory))


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write(directory, tensors):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_equal_copies_have_one_digest_whatever_their_times(tmp_path):
    copies = [write(tmp_path / name, tensors()) for name in ("a", "b")]
    os.utime(copies[1] / "model.safetensors", (1, 1))
    assert len({digest_of(copy) for copy in copies}) == 1


def changed(name, change):
    found = tensors()
    if change == "shape":
        found[name] = found[name].reshape(-1, 2)
    elif change == "dtype":
        found[name] = found[name].to(torch.int32)
    elif change == "name":
        found["other"] = found.pop(name)
    else:
        found[name].view(-1)[{"first": 0, "last": -1}[change]] += 1
    return found


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", ["shape", "dtype", "name", "first", "last"])
def test_every_tensor_counts_with_its_name_form_and_both_ends(tmp_path, name, change):
    copies = [write(tmp_path / "a", tensors()), write(tmp_path / "b", changed(name, change))]
    assert len({digest_of(copy) for copy in copies}) == 2


def test_a_large_tensor_is_sampled_at_equal_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(sampled_weights, "SAMPLED_EVERY_BYTES", 1 << 18)
    large = torch.zeros(1 << 20)
    before = digest_of(write(tmp_path / "a", {"large": large}))
    large[len(large) // 2 : len(large) // 2 + (1 << 16)] = 1.0
    assert digest_of(write(tmp_path / "b", {"large": large})) != before
