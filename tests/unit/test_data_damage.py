"""Prepared tokens that are no longer what was written are found and prepared again; nothing else is."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import good_rows, run, write_rows

from trainer.data import token_cache
from trainer.data.sample_writer import ARRAYS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of rows and the cache with its tokens."""
    directory = tmp_path_factory.mktemp("prepared")
    path = write_rows(directory / "rows.jsonl", *good_rows(300))
    run(path, cache=directory / "cache")
    return path, directory / "cache"


def flip(path: Path, num_bits: int) -> None:
    data = np.fromfile(path, dtype=np.uint8)
    bits = np.random.default_rng(num_bits).choice(data.size * 8, num_bits, replace=False)
    np.bitwise_xor.at(data, bits // 8, (1 << bits % 8).astype(np.uint8))
    data.tofile(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    **{f"{name} {n} bits": (f"{name}.npy", lambda path, n=n: flip(path, n)) for name in ARRAYS for n in (1, 30, 1000)},
    **{f"{name} truncated": (f"{name}.npy", truncate) for name in ARRAYS},
    "array missing": ("offsets.npy", Path.unlink),
    "array empty": ("input_ids.npy", lambda path: path.write_bytes(b"")),
    "summary one bit": ("summary.json", lambda path: flip(path, 1)),
    "summary torn": ("summary.json", truncate),
    "checksums one bit": ("SHA256SUMS", lambda path: flip(path, 1)),
    "checksums empty": ("SHA256SUMS", lambda path: path.write_bytes(b"")),
    "checksums missing": ("SHA256SUMS", Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_told_and_mended(
    tmp_path: Path, prepared: tuple[Path, Path], caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    path, cache = prepared[0], tmp_path / "cache"
    shutil.copytree(prepared[1], cache)
    expected = run(path, cache=prepared[1])
    (directory,) = (entry for entry in (cache / "tokens").iterdir() if entry.is_dir())
    damage(directory / name)
    mended = run(path, cache=cache)
    assert len(caplog.messages) == 1 and "are damaged (" in caplog.messages[0] and name in caplog.messages[0]
    assert "preparing them again" in caplog.messages[0]
    for array in ARRAYS:
        assert np.array_equal(np.load(mended.directory / f"{array}.npy"), np.load(expected.directory / f"{array}.npy"))
    assert mended.summary == expected.summary
    assert [entry.name for entry in (cache / "tokens").iterdir() if entry.is_dir()] == [directory.name]


def test_whole_tokens_are_not_prepared_again(prepared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_make", None)
    assert len(run(prepared[0], cache=prepared[1])) == 300


def test_whole_tokens_are_read_where_nothing_can_be_written(
    prepared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache.os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "write_text", None)
    for wait in (False, True):
        assert len(run(prepared[0], cache=prepared[1], wait=wait)) == 300


def test_a_waiting_rank_never_maps_damaged_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even though another launch has left word that they are whole, or that they cannot be prepared."""
    path, cache = write_rows(tmp_path / "rows.jsonl", *good_rows(20)), tmp_path / "cache"
    expected = run(path, cache=cache).input_ids.tolist()
    (directory,) = (entry for entry in (cache / "tokens").iterdir() if entry.is_dir())
    flip(directory / "input_ids.npy", 1)
    monkeypatch.setattr(token_cache, "_launch", lambda: "this one")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: run(path, cache=cache, wait=True).input_ids.tolist())
        for error in (None, "no such file"):
            directory.with_name(f"{directory.name}.outcome").write_text(json.dumps({"launch": "old", "error": error}))
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
        run(path, cache=cache)
        assert waiting.result(timeout=60) == expected


def test_the_name_of_a_cache_covers_the_code_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "data"
    shutil.copytree(Path(token_cache.__file__).parent, sources)
    monkeypatch.setattr(token_cache, "__file__", str(sources / "token_cache.py"))
    digest = token_cache._code_digest.__wrapped__
    before = digest()
    with (sources / "conversation.py").open("a") as file:
        file.write("# another rule\n")
    assert digest() != before
