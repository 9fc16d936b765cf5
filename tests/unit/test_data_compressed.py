"""Packed files of rows: read as the plain ones, and torn ones told apart from whole ones."""

import gzip
import json
import random
import re
from collections.abc import Callable

import pyarrow as pa
import pytest

from trainer.data.readers import iter_rows
from trainer.errors import DataError


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


PACKERS = pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zstd)])
Pack = Callable[[bytes], bytes]


def lines(first: int, last: int) -> bytes:
    draw = random.Random(1)
    return b"".join(
        json.dumps({"a": n, "b": f"é {draw.random()}"}).encode() + b"\n" for n in range(first, last)
    )


@PACKERS
def test_packed_lines_are_read_like_plain_ones(tmp_path, suffix, pack):
    plain, packed = tmp_path / "rows.jsonl", tmp_path / f"rows.jsonl.{suffix}"
    plain.write_bytes(b"\xef\xbb\xbf" + lines(0, 50) + b"\n{\n" + lines(50, 60))
    raw = plain.read_bytes()
    # as `cat a.gz b.gz` and parallel packers write them
    packed.write_bytes(pack(raw[:700]) + pack(raw[700:]))
    expected = [(row.line, row.record, str(row.problem)) for row in iter_rows(plain, ())]
    assert [(row.line, row.record, str(row.problem)) for row in iter_rows(packed, ())] == expected
    assert len(expected) == 61


@PACKERS
def test_a_torn_archive_ends_the_run_with_the_last_line_that_was_read(tmp_path, suffix, pack):
    path, whole = tmp_path / f"rows.jsonl.{suffix}", pack(lines(0, 100_000))
    path.write_bytes(whole[: len(whole) // 2])
    rows = iter_rows(path, ())
    count = 0
    with pytest.raises(DataError) as error:
        for count, row in enumerate(rows, start=1):
            assert row.line == count and row.problem is None
    told = re.fullmatch(
        rf"'{path}' cannot be read after line (\d+): Truncated compressed stream", str(error.value)
    )
    assert told and int(told[1]) >= count > 10_000
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(DataError, match="cannot be read after line 0: "):
        list(iter_rows(path, ()))
