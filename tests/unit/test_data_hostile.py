"""Files that cannot be trained on: each is refused by file, line and reason, and nothing is
kept of it.
"""

import gzip
import io
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import OPTIONS, run

from trainer.config import RowKeys
from trainer.errors import DataError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
GOOD = json.dumps({"messages": [USER, ANSWER]}).encode() + b"\n"
MANY = GOOD * 50


def chat(*messages: object, **columns: object) -> bytes:
    return json.dumps({"messages": list(messages), **columns}).encode()


def parquet(**columns: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def call(**message: object) -> dict[str, object]:
    return {"role": "assistant", "content": "", **message}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def json_calls(text: str) -> list[object]:
    return [{"type": "function", "function": {"name": "f", "arguments": text}}]


LINES: dict[bytes, str] = {
    b"\x00\x01\x02\x03": "broken JSON: ",
    b'{"messages": [': "broken JSON: Expecting value: line 1 column 15",
    b'{"messages": "\xff"}': "bad UTF-8: ",
    b"{" * 100_000: "broken JSON: ",
    b"[" * 100_000: "broken JSON: maximum recursion depth",
    b"1" * 5000: "broken JSON: Exceeds the limit",
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
    b'{"instruction": "a", "output": null}': "wrong content type: 'output' is null",
    chat(None): "message not an object: message 1 is null",
    chat({"content": "hi"}): "unknown role: message 1",
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
    chat(USER, call(content=" \n")): "empty assistant turn: message 2",
    chat(
        USER, {"role": "assistant", "function_call": {"name": "f"}}
    ): "wrong content type: content of message 2 (assistant) is null",
    chat(USER, ANSWER, tools=["f"]): "broken tools: 'tools' must be a list of objects",
}
FILES: dict[str, tuple[bytes, str]] = {
    "rows.jsonl.gz": (gzip.compress(MANY)[:-9], "cannot be read after line "),
    "rows.jsonl.zst": (MANY, "cannot be read after line 0: "),
    "none.jsonl": (b"\n\n", "no row to train on in "),
    "object.json": (b'{"a": 1}', "is not an array of objects.\nFix: make it an array"),
    "torn.json": (b'[\n{"a": 1},\n', "is not valid JSON: Expecting value: line 3"),
    "torn.parquet": (parquet(text=["a"])[:-5], "cannot be read as parquet after row 0"),
    "columns.parquet": (
        parquet(question=["a"], answer=["b"]),
        "row 1: unrecognised columns: found 'question', 'answer'",
    ),
}
HOSTILE = {
    f"line{number}.jsonl": (line + b"\n" + MANY, f":1: {why}")
    for number, (line, why) in enumerate(LINES.items())
}
HOSTILE |= FILES


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name_and_leaves_nothing(tmp_path, name):
    content, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        run(tmp_path / name, replace(OPTIONS, keys=RowKeys()), cache=tmp_path / "cache")
    assert reason in str(error.value)
    assert name in str(error.value) or name == "none.jsonl"
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


def test_bad_rows_of_a_file_whose_name_is_not_utf8_are_listed(tmp_path):
    path = tmp_path / "rows\udcff.jsonl"  # as a pattern finds it
    path.write_bytes(chat(USER) + b"\n")
    with pytest.raises(DataError) as error:
        run(path, replace(OPTIONS, keys=RowKeys()), cache=tmp_path / "cache")
    assert f"{path}:1: " in str(error.value)
    (listed,) = (tmp_path / "cache").glob("bad_rows_*.jsonl")
    assert json.loads(listed.read_text(encoding="utf-8"))["file"] == str(path)


def test_without_a_good_row_in_the_first_block_the_rest_is_not_read(tmp_path):
    bad = tmp_path / "bad.jsonl"
    good = tmp_path / "good.jsonl"
    bad.write_bytes(b'{"text": 1}\n' * 600)
    good.write_bytes(MANY)
    options = replace(OPTIONS, keys=RowKeys())
    with pytest.raises(DataError) as error:
        run([bad, good], options, cache=tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("250 of 250 rows cannot be trained on (0 can): ")
    assert lines[0].endswith("; reading stopped there")
    assert lines[2].startswith(f"  {bad}:2: unrecognised columns")
    assert len(lines) == 12 and lines[-1].startswith("Fix: ")
    with pytest.raises(DataError, match="600 of 650 rows cannot be trained on"):
        run([good, bad], options, cache=tmp_path)
