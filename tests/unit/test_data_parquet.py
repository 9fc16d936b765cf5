"""Parquet files: only the columns that are needed, nulls undone, odd values as bad rows; and
blocks of any format.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import CHATS
from tokenizer_fixtures import make_tokenizer

from trainer.config import RowKeys
from trainer.data.formats import Conversation, Item, RowParser, columns_of
from trainer.data.readers import iter_rows
from trainer.data.rows import UnusableError
from trainer.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
NS = pa.array([1000, 1]).cast(pa.timestamp("ns"))
YEARS = pa.array([0, 2**40]).cast(pa.timestamp("s"))


def read(path: Path, keys: RowKeys = CHATS) -> Iterator[Item]:
    parser = RowParser(keys, make_tokenizer(None))
    return map(parser.parse, iter_rows(path, columns_of(keys)))


def test_parquet_drops_the_nulls_that_fill_structs(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": null}'}}
    rows = [
        {
            "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [{"x": {"a": 1}}],
        },
        {"messages": [USER, {**ASSISTANT, "reasoning_content": "hm"}], "tools": [{"x": {"b": 2}}]},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = read(path)
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert [first.tools, second.tools] == [row["tools"] for row in rows]
    assert first.messages == [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert second.messages == [USER, {**ASSISTANT, "reasoning_content": "hm"}]


def test_parquet_bad_rows_are_named_by_row(tmp_path):
    raw = pa.array([b"fine", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"q": text, "a": ["x", "y", None]}), path)
    keys = RowKeys(prompt_key="q", response_key="a")
    results = list(read(path, keys))
    assert isinstance(results[0], Conversation)
    assert [str(item).split(":")[0] for item in results[1:]] == [
        "unreadable value",
        "unrecognised columns",
    ]
    assert [row.line for row in iter_rows(path, columns_of(keys)) if row.problem is not None] == [2]


@pytest.mark.parametrize("odd", [NS, YEARS], ids=["nanoseconds", "far years"])
def test_a_column_that_is_not_needed_is_not_read(tmp_path, odd):
    path = tmp_path / "rows.parquet"
    chats = pa.array([[USER, ASSISTANT]] * 2)
    pq.write_table(
        pa.table({"created": odd, "messages": chats, "extra": pa.array([{"a": 1}] * 2)}), path
    )
    assert [item.messages for item in read(path) if isinstance(item, Conversation)] == [
        [USER, ASSISTANT]
    ] * 2
    rows = list(iter_rows(path, ("messages", "tools")))
    assert [row.unread for row in rows if row.problem is None] == [("created", "extra.a")] * 2


@pytest.mark.parametrize("odd", [NS, YEARS], ids=["nanoseconds", "far years"])
def test_a_needed_column_with_an_odd_value_is_a_bad_row(tmp_path, odd):
    path, keys = tmp_path / "rows.parquet", RowKeys(prompt_key="x.q", response_key="a")
    fields = pa.StructArray.from_arrays([odd, pa.array(["one", "two"])], ["q", "other"])
    pq.write_table(pa.table({"x": fields, "a": ["three", "four"]}), path)
    first, second = read(path, keys)
    assert isinstance(first, UnusableError) and str(first).startswith("wrong content type: ")
    assert [row.line for row in iter_rows(path, columns_of(keys)) if row.problem is not None] == [2]
    assert str(second).startswith("unreadable value: column 'x' (struct<q: timestamp[")


def test_nested_columns_are_read_alone_and_named_when_mistyped(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"x": {"a": "hello", "id": 1, "q": "hi"}, "y": 2}]), path)
    right, wrong = (
        RowKeys(prompt_key="x.q", response_key="x.a"),
        RowKeys(prompt_key="x.quest", response_key="x.a"),
    )
    (row,) = iter_rows(path, columns_of(right))
    assert row.problem is None
    assert (row.record, row.unread) == ({"x": {"q": "hi", "a": "hello"}}, ("x.id", "y"))
    (found,) = read(path, right)
    assert isinstance(found, Conversation) and found.messages == [USER, ASSISTANT]
    (bad,) = read(path, wrong)
    assert isinstance(bad, UnusableError)
    expected = (
        "unrecognised columns: found 'x.a', 'x.id', 'x.q', 'y'; tried 'x.quest' "
        "(data.prompt_key), which is missing or null"
    )
    assert str(bad) == expected


def test_two_columns_of_one_name_are_refused_unless_nothing_reads_them(tmp_path):
    path, keys = tmp_path / "rows.parquet", RowKeys(prompt_key="q", response_key="a")
    table = pa.Table.from_arrays(
        [pa.array(["hi"]), pa.array(["hello"]), pa.array(["bye"])], names=["q", "a", "a"]
    )
    pq.write_table(table, path)
    with pytest.raises(DataError, match=rf"'{path}' has 2 columns 'a'.*\n.*Fix: "):
        list(read(path, keys))
    pq.write_table(
        table.rename_columns(["extra", "q", "extra"]).append_column("a", pa.array(["hello"])), path
    )
    (row,) = iter_rows(path, columns_of(keys))
    assert (row.record, row.unread) == ({"q": "hello", "a": "hello"}, ("extra", "extra"))
