"""Tests of accepted data files, and of files that are refused at once with a fix."""

import os

import pytest
from processes import run_python

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
        ("dangling.jsonl", "no file matches '.*dangling.jsonl'"),
        ("x" * 300, "no file matches '.*/x+'"),
        (".", "is not a regular file.\nFix: "),
        ("notes.log", "unsupported format '.log'; the supported formats are .jsonl, .jsonl.gz, "),
        ("rows.csv", r"unsupported format '.csv'(?s:.*) convert it: python -c .*rows.csv'"),
        ("pipe.jsonl", "'.*pipe.jsonl' is not a regular file"),
        ("link.jsonl", "'.*link.jsonl' is not a regular file"),
    ],
)
def test_unresolvable_files_are_named(tmp_path, name, message):
    for file in ("notes.log", "rows.csv"):
        (tmp_path / file).write_text("hi")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(DataError, match=message):
        resolve_files(str(tmp_path / name))


def test_looking_for_files_imports_nothing_slow():
    code = "import sys, trainer.data.files; print({'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"
