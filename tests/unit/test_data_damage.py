"""Prepared tokens that are no longer what was written are found and prepared again; nothing
else is.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from prepared import good_rows, run, write_rows

from trainer.data import token_cache
from trainer.data.prepare import ROWS, TOKENS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of rows and the cache with its tokens."""
    directory = tmp_path_factory.mktemp("prepared")
    path = write_rows(directory / "rows.jsonl", *good_rows(300))
    run(path, cache=directory / "cache")
    return path, directory / "cache"


def flip(path: Path) -> None:
    """Change one bit."""
    data = np.fromfile(path, dtype=np.uint8)
    data[len(data) // 2] ^= 1
    data.tofile(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    **{f"{name} bits": (name, flip) for name in (TOKENS, ROWS, "summary.json", "SHA256SUMS")},
    "tokens truncated": (TOKENS, truncate),
    "rows missing": (ROWS, Path.unlink),
    "summary torn": ("summary.json", truncate),
    "checksums empty": ("SHA256SUMS", lambda path: path.write_bytes(b"")),
    "checksums missing": ("SHA256SUMS", Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_told_and_mended(tmp_path, prepared, caplog, name, damage):
    path = prepared[0]
    cache = tmp_path / "cache"
    shutil.copytree(prepared[1], cache)
    expected = run(path, cache=prepared[1])
    directory = cache / "tokens" / expected.directory.name
    damage(directory / name)
    mended = run(path, cache=cache)
    [message] = caplog.messages
    assert f"{directory} are damaged: preparing them again" in message
    for written in (TOKENS, ROWS):
        content = (expected.directory / written).read_bytes()
        assert (mended.directory / written).read_bytes() == content
    assert mended.summary == expected.summary
    assert [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()] == [directory]


def test_whole_tokens_are_read_where_nothing_can_be_written(prepared, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", None)
    monkeypatch.setattr(Path, "write_text", None)
    assert len(run(prepared[0], cache=prepared[1])) == 300


def test_the_name_of_a_cache_covers_the_code_that_makes_it(tmp_path, monkeypatch):
    sources = tmp_path / "data"
    shutil.copytree(Path(token_cache.__file__).parent, sources)
    monkeypatch.setattr(token_cache, "__file__", str(sources / "token_cache.py"))
    digest = token_cache._code_digest.__wrapped__
    before = digest()
    with (sources / "formats.py").open("a") as file:
        file.write("# another rule\n")
    assert digest() != before
