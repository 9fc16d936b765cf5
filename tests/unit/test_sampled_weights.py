"""The digest of weights by samples: what it tells apart, and that it reads little."""

from pathlib import Path

import pytest

from trainer.model import sampled_weights
from trainer.model.sampled_weights import digest_of_weights

SMALL = 1 << 14
LARGE = 1 << 20
NAME = "model.safetensors"


def digest_of(directory: Path, name: str, content: bytes) -> str:
    directory.mkdir()
    (directory / name).write_bytes(content)
    return digest_of_weights([directory / name])


@pytest.mark.parametrize(
    ("size", "name", "at", "num_changed", "is_equal"),
    [
        (SMALL, NAME, 0, 0, True),
        (SMALL, "other.safetensors", 0, 0, False),
        (SMALL, NAME, SMALL, 1, False),
        (SMALL, NAME, 5000, 1, False),
        (LARGE, NAME, 0, 1, False),
        (LARGE, NAME, LARGE - 1, 1, False),
        (LARGE, NAME, LARGE // 2, 1 << 13, False),
        (LARGE, NAME, 5000, 1, True),
    ],
)
def test_files_differ_by_name_size_and_samples(
    tmp_path, monkeypatch, size, name, at, num_changed, is_equal
):
    """Of the large file, 4 KiB of every 8 are read."""
    monkeypatch.setattr(sampled_weights, "LEAST_BLOCKS", 128)
    plain = bytes(size)
    changed = plain[:at] + b"x" * num_changed + plain[at + num_changed :]
    digests = digest_of(tmp_path / "a", NAME, plain), digest_of(tmp_path / "b", name, changed)
    assert (digests[0] == digests[1]) == is_equal
