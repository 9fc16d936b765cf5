"""Files that cannot be used for training: each is refused with file, line and reason, and nothing
of it is kept.
"""

import gzip
import io
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import OPTIONS, run
from small_files import read_lines

from trainer.config import RowKeys
from trainer.errors import DataError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
GOOD = json.dumps({"messages": [USER, ANSWER]}).encode() + b"\n"
MANY = GOOD * 50


def chat(*messages, **columns):
    return json.dumps({"messages": list(messages), **columns}).encode()


def parquet(**columns):
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def call(**message):
    return {"role": "assistant", "content": "", **message}


def nested(depth):
    return "[" * depth + "]" * depth


def json_calls(text):
    return [{"type": "function", "function": {"name": "f", "arguments": text}}]


LINES = {
    b"\x00\x01\x02\x03": "broken JSON: ",
    b'{"messages": [': "broken JSON: Expecting value: line 1 column 15",
    b'{"messages": "\xff"}': "bad UTF-8: ",
    b"{" * 100_000: "broken JSON: ",
    b"[" * 100_000: "broken JSON: maximum recursion depth",
    b"1" * 5000: "broken JSON: Exceeds the limit",
    b'{"a": 1, "a": 2}': "broken JSON: an object has several values for the key 'a'",
    b"[1, 2]": "not an object: the row is a list",
    b"{}": "unrecognised columns: found no columns",
    b'{"prompt": "a", "completion": 3}': "unrecognised columns: found 'prompt', 'completion'",
    b'{"prompt": "a", "completion": " "}': "empty text",
    b'{"prompt": "a", "completion": "<|im_end|>b"}': "special token in content: the text contains "
    "'<|im_end|>'",
    b'{"prompt": "a", "completion": "\\ud800"}': "bad unicode: half of a surrogate pair",
    b'{"messages": {"role": "user"}}': "messages not a list: 'messages' is dict",
    b'{"messages": []}': "no messages: 'messages' is an empty list",
    b'{"conversations": [{"from": "alien", "value": "x"}]}': "unknown role: message 1 is from "
    "'alien'",
    b'{"conversations": [{"from": "function_call", "value": "f("}]}': "broken tool_calls: "
    "function_call in message 1",
    b'{"instruction": "a", "input": 0, "output": "b"}': "wrong content type: 'input' is int",
    b'{"instruction": "a", "output": null}': "wrong content type: 'output' is null",
    chat(None): "message not an object: message 1 is null",
    chat({"role": ["user"], "content": "hi"}): "unknown role: message 1 has role ['user']",
    chat(USER, call(content=5)): "wrong content type: content of message 2 (assistant) is int",
    chat(
        USER, {"role": "user", "content": [{"type": "image"}]}
    ): "wrong content type: content of message 2 (user)",
    chat(USER, call(content="a\ud800")): "bad unicode: half of a surrogate pair",
    chat(USER): "no assistant turn",
    chat(USER, call()): "empty assistant turn: message 2",
    chat(USER, call(tool_calls="f()")): "broken tool_calls: 'tool_calls' of message 2",
    chat(USER, ANSWER, tools="[{"): "broken tools: 'tools' must be a list of objects",
    chat(USER, ANSWER, tools=nested(2000)): "nested too deeply: ",
    chat(USER, call(tool_calls=json_calls('{"x":1'))): "broken tool_calls: the arguments of a call "
    "in message 2 are not JSON: '{\"x\":1'",
    chat(USER, call(tool_calls=json_calls(nested(2000)))): "nested too deeply: ",
    b'{"conversations": [{"from": "function_call", "value": "%s"}]}'
    % nested(2000).encode(): "nested too deeply: ",
    chat(
        USER, {**ANSWER, "content": "a<|im_end|>"}
    ): "special token in content: message 2 (assistant)",
    chat(USER, {**ANSWER, "content": "a" * 500}): "over-long: ",
    b'{"messages": null}': "messages not a list: 'messages' is null",
    b'{"instruction": "", "output": "b"}': "empty prompt: message 1",
    chat(
        USER, {"role": "assistant", "function_call": {"name": "f"}}
    ): "wrong content type: content of message 2 (assistant) is null",
}
FILES = {
    "rows.jsonl.gz": (gzip.compress(MANY)[:-9], "cannot be read after line "),
    "rows.jsonl.zst": (MANY, "cannot be read after line 0: "),
    "none.jsonl": (b"\n\n", "there are no rows in "),
    "object.json": (b'{"a": 1}', "is not an array of objects.\nFix: make it an array"),
    "twice.json": (b'[{"a": {"b": 1, "b": 2}}]', "an object has several values for the key 'b'"),
    "torn.json": (b'[\n{"a": 1},\n', "is not valid JSON: Expecting value: line 3"),
    "torn.parquet": (parquet(text=["a"])[:-5], "cannot be read as parquet after row 0"),
    "columns.parquet": (
        parquet(question=["a"], answer=["b"]),
        "row 1: unrecognised columns: found 'question', 'answer'",
    ),
}


def refusal(*files):
    """Return the message about files that cannot be used for training. Nothing of them is kept."""
    cache = files[0].with_name("cache")
    with pytest.raises(DataError) as error:
        run(list(files), replace(OPTIONS, keys=RowKeys()), cache=cache)
    assert not [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    return str(error.value)


def listed(directory):
    """Return the rows in the list of bad rows that a message names."""
    (path,) = (directory / "cache").glob("bad_rows_*.jsonl")
    return list(read_lines(path))


def test_every_bad_line_is_listed_with_its_reason(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n".join(LINES))
    message = refusal(path)
    assert f"{len(LINES)} of {len(LINES) + 1} rows cannot be used for training (1 can)" in message
    assert "data.truncation" in message
    found = listed(tmp_path)
    assert [row["line"] for row in found] == list(range(2, len(LINES) + 2))
    for row, reason in zip(found, LINES.values(), strict=True):
        assert row["reason"].startswith(reason)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_by_name(tmp_path, name):
    content, reason = FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert reason in message and name in message


def test_bad_rows_of_a_file_whose_name_is_not_utf8_are_listed(tmp_path):
    path = tmp_path / "rows\udcff.jsonl"  # as a pattern finds it
    path.write_bytes(chat(USER) + b"\n")
    assert f"{path}:1: " in refusal(path)
    [row] = listed(tmp_path)
    assert row["file"] == str(path)


def test_without_a_good_row_in_the_first_block_the_rest_is_not_read(tmp_path):
    bad = tmp_path / "bad.jsonl"
    good = tmp_path / "good.jsonl"
    bad.write_bytes(b'{"text": 1}\n' * 600)
    good.write_bytes(MANY)
    lines = refusal(bad, good).splitlines()
    kinds = "250 unrecognised columns; reading stopped there"
    assert lines[0] == f"250 of 250 rows cannot be used for training (0 can): {kinds}"
    assert lines[2].startswith(f"  {bad}:2: unrecognised columns")
    assert len(lines) == 12 and lines[-1].startswith("Fix: ")
    message = refusal(good, bad)
    assert (
        "600 of 650 rows cannot be used for training" in message
        and "data.on_bad_row=skip" in message
    )
