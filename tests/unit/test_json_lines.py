"""JSON on disk: lines that are read while others are written, numbers that JSON lacks, files
that are no JSON.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from trainer.errors import CannotWriteError
from trainer.runtime.json_lines import AppendFile, JsonLines, strict


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines, places = JsonLines(path), []
    assert list(lines) == []
    with path.open("w") as file:
        for text, expected in (
            ('{"a": 1}\n{"a"', [1]),
            (": 2", []),
            ('}\nnot json\n[1]\n{"a": 3}\n', [2, 3]),
        ):
            file.write(text)
            file.flush()
            found = list(lines)
            assert [row["a"] for _, row in found] == expected
            places += found
    content = path.read_bytes()
    assert [json.loads(content[offset:].splitlines()[0]) for offset, _ in places] == [
        row for _, row in places
    ]


def test_damaged_lines_end_no_reading_and_a_whole_one_behind_a_torn_one_is_read_at_its_place(
    tmp_path,
):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"[" * 100_000 + b'\n{"step": 1, "l{"step": 2}\n\n{"step": 3}\n{"step": 4')
    lines = JsonLines(path)
    found = list(lines)
    assert ([row["step"] for _, row in found], lines.num_unparsed) == ([2, 3], 2)
    assert [json.loads(path.read_bytes()[offset:].splitlines()[0]) for offset, _ in found] == [
        row for _, row in found
    ]


@dataclass(frozen=True)
class Point:
    x: float
    path: Path


def test_what_json_lacks_is_written_strictly():
    value = {
        1: (math.nan, -math.inf, 0.5),
        "point": Point(math.inf, Path("a/b")),
        "on": True,
        "none": None,
    }
    named = {
        "1": ["nan", "-inf", 0.5],
        "point": {"x": "inf", "path": "a/b"},
        "on": True,
        "none": None,
    }
    assert strict(value) == named
    assert strict(value, nonfinite=lambda _: None)["1"] == [None, None, 0.5]
    assert (
        json.dumps(strict([np.float32(0.5), np.int64(3), np.float64("nan")]), allow_nan=False)
        == '[0.5, 3, "nan"]'
    )


def test_a_guest_leaves_the_line_alone_that_another_process_is_writing(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    file = AppendFile(path, is_guest=True)
    file.append({"step": 2})
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"st{"step":2}\n'
    (tmp_path / "torn.jsonl").write_bytes(b'{"step": 1}\n{"st')
    AppendFile(tmp_path / "torn.jsonl").close()
    assert (tmp_path / "torn.jsonl").read_bytes() == b'{"step": 1}\n'


def test_the_cut_of_a_torn_line_is_durable_before_lines_take_its_place(tmp_path, monkeypatch):
    path, synced = tmp_path / "rows.jsonl", []
    path.write_bytes(b'{"step": 1}\n{"st')
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    file = AppendFile(path)
    assert synced == [b'{"step": 1}\n']
    file.close()


def steps(path: Path) -> list[int]:
    return [row["step"] for _, row in JsonLines(path)]


@pytest.mark.parametrize("is_removed", [False, True])
def test_rows_go_on_at_the_path_when_the_file_is_moved_away(tmp_path, caplog, is_removed):
    path, moved = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.1"
    file = AppendFile(path)
    for step in (1, 2, 3, 4):
        if step == 3:
            path.unlink() if is_removed else path.rename(moved)
        file.append({"step": step})
    file.close()
    assert steps(path) == [3, 4] and (is_removed or steps(moved) == [1, 2])
    assert caplog.text.count("was moved away or removed") == 1


def test_rows_stay_in_the_open_file_when_the_directory_is_renamed(tmp_path):
    (tmp_path / "run").mkdir()
    file = AppendFile(tmp_path / "run" / "rows.jsonl")
    file.append({"step": 1})
    (tmp_path / "run").rename(tmp_path / "renamed")
    file.append({"step": 2})
    file.close()
    assert steps(tmp_path / "renamed" / "rows.jsonl") == [1, 2]


def test_no_row_is_written_through_a_link_or_into_what_is_no_file(tmp_path, caplog):
    path, target = tmp_path / "rows.jsonl", tmp_path / "target"
    target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(CannotWriteError, match=r"rows.jsonl.*Fix: move .*rows.jsonl away"):
        AppendFile(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CannotWriteError, match=r"is not a regular file.*Fix: move"):
        AppendFile(path)
    path.unlink()
    file = AppendFile(path)
    file.append({"step": 1})
    path.rename(tmp_path / "moved")
    path.symlink_to(target)
    file.append({"step": 2})
    assert "rows wait in memory" in caplog.text
    path.unlink()
    file.append({"step": 3})
    file.close()
    assert steps(path) == [2, 3] and target.read_text() == "precious"
