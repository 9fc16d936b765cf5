"""JSON on disk: lines that are read while others are written, numbers that JSON lacks, and odd
files.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.errors import CannotWriteError
from trainer.runtime.json_lines import AppendFile, JsonLines, strict


def steps(path):
    return [row["step"] for _, row in JsonLines(path)]


def test_a_line_is_read_once_when_it_is_whole_and_at_its_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    places = []
    assert list(lines) == []
    nested = "[" * 100_000
    torn = '{"step": 1, "l'
    with path.open("w") as file:
        for text, expected in (
            ('{"step": 1}\n{"step"', [1]),
            (": 2", []),
            ('}\nnot json\n[1]\n{"step": 3}\n', [2, 3]),
            (f'{nested}\n{torn}{{"step": 4}}\n\n{{"step": 5}}\n{{"step": 6', [4, 5]),
        ):
            file.write(text)
            file.flush()
            found = list(lines)
            assert [row["step"] for _, row in found] == expected
            places += found
    content = path.read_bytes()
    for offset, row in places:
        assert json.loads(content[offset:].splitlines()[0]) == row
    assert lines.num_unparsed == 4


@dataclass(frozen=True)
class Point:
    x: float
    path: Path


def test_what_json_lacks_is_written_strictly():
    value = {1: (math.nan, -math.inf, 0.5), "point": Point(math.inf, Path("a/b")), "on": True}
    named = {"1": ["nan", "-inf", 0.5], "point": {"x": "inf", "path": "a/b"}, "on": True}
    assert strict(value) == named


def test_the_owner_of_a_file_cuts_a_torn_line_durably_and_a_guest_leaves_it(tmp_path, monkeypatch):
    """To a guest, a line that the owner is writing looks torn. The cut is durable before new lines
    take its place.
    """
    path = tmp_path / "rows.jsonl"
    synced = []
    torn = b'{"step": 1}\n{"st'
    path.write_bytes(torn)
    file = AppendFile(path, is_guest=True)
    file.append({"step": 2})
    file.close()
    assert path.read_bytes() == torn + b'{"step":2}\n'
    path.write_bytes(torn)
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    file = AppendFile(path)
    assert synced == [b'{"step": 1}\n']
    file.close()


@pytest.mark.parametrize("is_removed", [False, True])
def test_rows_go_on_at_the_path_when_the_file_is_moved_away(tmp_path, caplog, is_removed):
    path = tmp_path / "rows.jsonl"
    moved = tmp_path / "rows.jsonl.1"
    file = AppendFile(path)
    for step in (1, 2, 3, 4):
        if step == 3:
            path.unlink() if is_removed else path.rename(moved)
        file.append({"step": step})
    file.close()
    assert steps(path) == [3, 4] and (is_removed or steps(moved) == [1, 2])
    assert caplog.text.count("was moved or removed") == 1


def test_rows_stay_in_the_open_file_when_the_directory_is_renamed(tmp_path):
    file = AppendFile(tmp_path / "run" / "rows.jsonl")
    file.append({"step": 1})
    (tmp_path / "run").rename(tmp_path / "renamed")
    file.append({"step": 2})
    file.close()
    assert steps(tmp_path / "renamed" / "rows.jsonl") == [1, 2]


def test_no_row_is_written_through_a_link_or_into_what_is_no_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    target = tmp_path / "target"
    target.write_text("precious")
    for make in (lambda: path.symlink_to(target), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(
            CannotWriteError, match=r"(?s)rows.jsonl.*Fix: .*move .*rows.jsonl away"
        ):
            AppendFile(path)
        path.unlink()
    assert target.read_text() == "precious"
