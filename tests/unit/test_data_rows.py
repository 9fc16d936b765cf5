"""Files to conversations: formats, shapes, and every kind of bad row with file, line and reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared import to_conversation

from trainer.config import RowKeys
from trainer.data.formats import Conversation, columns_of
from trainer.data.readers import iter_rows as read_rows
from trainer.data.rows import Row, UnusableError

KEYS = RowKeys()
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
GOOD = {"messages": [USER, ASSISTANT]}


def iter_rows(path: Path, keys: RowKeys = KEYS) -> Iterator[Row]:
    return read_rows(path, columns_of(keys))


def convert(record: dict, keys: RowKeys = KEYS) -> Conversation | UnusableError:
    return to_conversation(Row(Path("a.jsonl"), 7, record), keys)


def messages_of(record: dict, keys: RowKeys = KEYS) -> list[dict]:
    conversation = convert(record, keys)
    assert isinstance(conversation, Conversation), conversation
    return conversation.messages


def row(*messages: object, **columns: object) -> str:
    return json.dumps({"messages": list(messages), **columns})


def test_jsonl_takes_bom_crlf_blank_lines_and_no_final_newline(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xf0\x9f\x99\x82"}')
    assert [(item.line, item.record) for item in iter_rows(path)] == [
        (1, {"a": 1}),
        (4, {"a": "🙂"}),
    ]


def test_prompt_and_response_keys_nested() -> None:
    keys = RowKeys(prompt_key="extra.question", response_key="extra.answer")
    assert messages_of({"extra": {"question": "hi", "answer": "hello"}}, keys) == GOOD["messages"]
    dotted = {"extra.question": "hi", "extra.answer": "hello"}
    assert messages_of(dotted, keys) == GOOD["messages"]
    system = {"role": "system", "content": "be kind"}
    chat_prompt = {"extra": {"question": [system, USER], "answer": "hello"}}
    assert messages_of(chat_prompt, keys) == [system, *GOOD["messages"]]
    bad = convert({"extra": {"question": "hi"}}, keys)
    assert isinstance(bad, UnusableError)
    assert (
        str(bad)
        == "unrecognised columns: found 'extra.question'; tried 'extra.answer' (data.response_key), "
        "which is missing or null"
    )


@pytest.mark.parametrize(
    ("record", "keys", "part"),
    [
        ({"question": "a", "answer": "b"}, KEYS, "data.prompt_key=question data.response_key=answer"),
        ({"id": 1, "prompt": ["a"], "completion": "b"}, KEYS, "data.prompt_key=prompt "
                                                              "data.response_key=completion"),
        ({"x": {"Query": "a", "response": "b"}}, KEYS, "data.prompt_key=x.Query "
                                                       "data.response_key=x.response"),
        ({"dialog": GOOD["messages"]}, KEYS, "a column of messages is read with "
                                             "data.messages_key=dialog"),
        ({"x": {"chosen": GOOD["messages"]}, "prompt": "a"}, KEYS, "is read with "
                                                                   "data.messages_key=x.chosen"),
        ({"prompt": [USER], "x": {"answer": "b"}}, KEYS, "data.prompt_key=prompt "
                                                         "data.response_key=x.answer"),
        ({"prompt": [{"role": []}], "chosen": "b"}, KEYS, "data.prompt_key=prompt "
                                                          "data.response_key=chosen"),
        ({"text": 3}, KEYS, "for single-turn columns set data.prompt_key and data.response_key"),
        ({"x": {"Text": "a"}, "id": 1}, KEYS, "a column of plain text is read with "
                                              "data.text_key=x.Text"),
        ({"x": {"question": "a", "y": {"z": 1}}}, RowKeys(prompt_key="x.qestion", response_key="a"),
         "found 'x.question', 'x.y.z'; tried 'x.qestion' (data.prompt_key)"),
        ({f"column{i}": 0 for i in range(50)}, KEYS, "'column29' and 20 more; tried"),
    ],
)  # fmt: skip
def test_unrecognised_columns_are_named_with_the_override_that_fits(
    record: dict, keys: RowKeys, part: str
) -> None:
    bad = convert(record, keys)
    assert isinstance(bad, UnusableError)
    assert str(bad).startswith("unrecognised columns: ") and part in str(bad)


def test_messages_keep_extra_keys_join_text_parts_and_drop_nulls() -> None:
    record = {
        "chat": {
            "turns": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
                    "name": None,
                },
                {**ASSISTANT, "reasoning_content": "hm"},
            ]
        },
        "functions": '[{"type": "function"}]',
    }
    conversation = convert(record, RowKeys(messages_key="chat.turns", tools_key="functions"))
    assert conversation == Conversation(
        [{"role": "user", "content": "a b"}, {**ASSISTANT, "reasoning_content": "hm"}],
        [{"type": "function"}],
    )


def test_messages_may_be_json_text() -> None:
    assert messages_of({"messages": json.dumps(GOOD["messages"])}) == GOOD["messages"]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert messages_of({"conversations": json.dumps(turns)}) == GOOD["messages"]


def test_sharegpt() -> None:
    record = {
        "system": "be kind",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "hello"},
        ],
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages_of(record) == [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        ASSISTANT,
    ]


def test_alpaca() -> None:
    record = {
        "instruction": "add",
        "input": "1 2",
        "output": "3",
        "system": "s",
        "history": [["hi", "hello"]],
    }
    assert messages_of(record) == [
        {"role": "system", "content": "s"},
        USER,
        ASSISTANT,
        {"role": "user", "content": "add\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert messages_of({"instruction": "add", "input": "", "output": "3"})[0]["content"] == "add"
