"""What is accepted as a data file, and what is refused at once, with the way out."""

import os
import socket
import subprocess
import sys

import pytest

from trainer.data.files import resolve_files
from trainer.errors import DataError


def test_resolve_files(tmp_path):
    b, a, odd = (tmp_path / name for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"))
    for path in (b, a, odd):
        path.write_text("{}\n")
    assert resolve_files(str(a)) == [a]
    assert resolve_files(f"{tmp_path}/?.jsonl") == [a, b]
    assert resolve_files([str(b), f"{tmp_path}/a*.jsonl"]) == [b, a]
    assert resolve_files(str(odd)) == [odd]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no file matches '.*missing.jsonl'"),
        ("*.parquet", r"no file matches '.*\*.parquet'"),
        (".", r"is a directory: name its files, such as '.*/\*.jsonl'$"),
        ("empty", r"is a directory: name its files, such as '.*/empty/\*.jsonl'$"),
        ("rows.ndjson", r"rename it: mv '.*/rows.ndjson' '.*/rows.ndjson.jsonl'$"),
        (
            "notes.txt",
            r"unsupported format '.txt': .* make a row of each line, to be read with "
            r"data.text_key=text",
        ),
        (
            "notes.log",
            "unsupported format '.log': supported are .jsonl, .jsonl.gz, .jsonl.zst, .json, "
            ".parquet$",
        ),
        ("rows.csv", r"unsupported format '.csv': .* convert it: python -c .*rows.csv'"),
        ("rows.json.gz", "unpack it: gunzip '.*rows.json.gz'"),
        (
            "pipe.jsonl",
            "'.*pipe.jsonl' is a pipe, a socket or a device; data is read more than once",
        ),
        ("link.jsonl", "'.*link.jsonl' is a pipe, a socket or a device"),
        ("socket.jsonl", "'.*socket.jsonl' is a pipe, a socket or a device"),
        ("dangling.jsonl", "no file matches '.*dangling.jsonl'"),
    ],
)
def test_unresolvable_files_are_named(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "notes.log", "rows.csv", "rows.json.gz", "rows.ndjson"):
        (tmp_path / file).write_text("hi")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket.jsonl"))
    with pytest.raises(DataError, match=message):
        resolve_files([str(tmp_path / name)])


def test_looking_for_files_imports_nothing_slow():
    code = "import sys, trainer.data.files; print({'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        ).stdout
        == "set()\n"
    )
