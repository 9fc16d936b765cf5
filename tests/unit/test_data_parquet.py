"""Parquet files: only needed columns are read, nulls are removed, odd values are bad rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import CHATS, messages_of, parsed

from trainer.config import RowKeys
from trainer.data.formats import columns_of
from trainer.data.readers import iter_rows
from trainer.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
NS = pa.array([1000, 1]).cast(pa.timestamp("ns"))
YEARS = pa.array([0, 2**40]).cast(pa.timestamp("s"))
BYTES = pa.array([b"fine", b"\xff\xfe"], pa.binary())
NO_TEXT = pa.StringArray.from_buffers(2, BYTES.buffers()[1], BYTES.buffers()[2])
PAIR = RowKeys(prompt_key="q", response_key="a")


def read(path, table, keys=CHATS):
    pq.write_table(table, path)
    return list(iter_rows(path, columns_of(keys)))


def test_nulls_that_fill_structs_are_dropped(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": null}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    thinking = {**ASSISTANT, "reasoning_content": "hm"}
    rows = [
        {"messages": [USER, calling], "tools": [{"x": {"a": 1}}]},
        {"messages": [USER, thinking], "tools": [{"x": {"b": 2}}]},
    ]
    found = read(tmp_path / "rows.parquet", pa.Table.from_pylist(rows))
    assert list(map(messages_of, found)) == [[USER, {**calling, "content": ""}], [USER, thinking]]
    assert [row.record["tools"] for row in found] == [row["tools"] for row in rows]


@pytest.mark.parametrize("odd", [NS, YEARS], ids=["nanoseconds", "far years"])
def test_a_column_that_is_not_needed_is_not_read(tmp_path, odd):
    chats = [[USER, ASSISTANT]] * 2
    table = pa.table({"created": odd, "messages": chats, "extra": [{"a": 1}] * 2})
    rows = read(tmp_path / "rows.parquet", table)
    assert list(map(messages_of, rows)) == chats
    assert [row.unread for row in rows] == [("created", "extra.a")] * 2


@pytest.mark.parametrize("odd", [NS, YEARS, NO_TEXT], ids=["nanoseconds", "far years", "no UTF-8"])
def test_a_needed_column_with_an_odd_value_is_a_bad_row(tmp_path, odd):
    keys = RowKeys(prompt_key="x.q", response_key="a")
    fields = pa.StructArray.from_arrays([odd, pa.array(["one", "two"])], ["q", "other"])
    table = pa.table({"x": fields, "a": ["three", "four"]})
    good, bad = read(tmp_path / "rows.parquet", table, keys)
    assert good.problem is None and bad.line == 2
    assert str(bad.problem).startswith("unreadable value: ")


def test_nested_columns_are_read_alone_and_named_when_mistyped(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([{"x": {"a": "hello", "id": 1, "q": "hi"}, "y": 2}])
    (row,) = read(path, table, keys := RowKeys(prompt_key="x.q", response_key="x.a"))
    assert messages_of(row, keys) == [USER, ASSISTANT]
    assert (row.record, row.unread) == ({"x": {"q": "hi", "a": "hello"}}, ("x.id", "y"))
    (row,) = read(path, table, keys := RowKeys(prompt_key="x.quest", response_key="x.a"))
    found = "found 'x.a', 'x.id', 'x.q', 'y'; tried 'x.quest' (data.prompt_key)"
    assert found in str(parsed(row, keys))


def test_two_columns_of_one_name_are_refused_unless_nothing_reads_them(tmp_path):
    path = tmp_path / "rows.parquet"
    values = [pa.array([text]) for text in ("hi", "hello", "bye", "more")]
    two_answers = pa.Table.from_arrays(values, names=["q", "a", "a", "extra"])
    with pytest.raises(
        DataError, match=rf"'{path}' has several columns with the same name.*\n.*Fix: "
    ):
        read(path, two_answers, PAIR)
    two_extra = pa.Table.from_arrays(values, names=["q", "a", "extra", "extra"])
    (row,) = read(path, two_extra, PAIR)
    assert messages_of(row, PAIR) == [USER, ASSISTANT]
