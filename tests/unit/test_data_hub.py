"""Datasets of the Hub out of its cache, without a network."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from trainer.data.files import resolve_files
from trainer.data.readers import iter_rows
from trainer.errors import DataError
from trainer.train.start.compose import load_config

OLD, NEW = "1" * 40, "2" * 40
FILES = {
    OLD: (
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/train_sft-0.parquet",
    ),
    NEW: (
        "data/train-00000-of-00002.parquet",
        "a/test.parquet",
        "b/test/0000.parquet",
        "val.parquet",
        "notes.txt",
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "datasets--org--name"
    for commit, names in FILES.items():
        for name in names:
            path = root / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"text": [f"{commit[0]} {name}"]}), path)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(NEW)
    (root / "refs" / "v1").write_text(OLD)
    return root / "snapshots"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (f"hf://org/name@{OLD}:train", [f"{OLD}/{name}" for name in FILES[OLD][:2]]),
        ("hf://org/name@v1:train", [f"{OLD}/{name}" for name in FILES[OLD][:2]]),
        ("hf://org/name@v1:train_sft", [f"{OLD}/data/train_sft-0.parquet"]),
        ("hf://org/name:val", [f"{NEW}/val.parquet"]),
        ("hf://org/name:b/test", [f"{NEW}/b/test/0000.parquet"]),
        ("hf://org/name:a/*.parquet", [f"{NEW}/a/test.parquet"]),
    ],
)
def test_a_split_is_found_at_its_revision(cache, address, expected):
    given = load_config([f"data.train_files={address}"]).data.train_files
    files = resolve_files([given] if isinstance(given, str) else [])
    assert [file.relative_to(cache).as_posix() for file in files] == expected
    (row,) = iter_rows(files[0], ("text",))
    assert row.record == {"text": f"{expected[0][0]} {expected[0][41:]}"}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "hf://org/name:test",
            "several subsets have this split, name one in its place: a/test, b/test$",
        ),
        (
            "hf://org/name:train",
            r"(?s)not whole in the Hub's cache \(.*hf download .* dataset org/name --include "
            r"'\*train\*'`",
        ),
        (
            f"hf://org/name@{'3' * 40}:train",
            f"(?s)run `hf download .*--include '.train.' --revision {'3' * 40}` elsewhere and copy",
        ),
        ("hf://org/other:train", "is not whole in the Hub's cache"),
        (
            "hf://org/name",
            "is no address: write hf://org/name:split or hf://org/name@revision:split",
        ),
    ],
)
def test_what_is_not_there_is_said_with_the_command_that_brings_it(address, message):
    with pytest.raises(DataError, match=message):
        resolve_files(address)
