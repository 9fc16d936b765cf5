"""Rows of every format: how they are recognised, which parts are trained, and why a row is refused."""

import functools
import gzip
import json
import re

import pyarrow as pa
import pytest
import tokenizer_fixtures as fixtures
from prepared import CHATS, encoded, marked, messages_of, parsed
from tokenizers import processors

from trainer.config import RowKeys
from trainer.data.formats import Conversation, vocabulary_digest
from trainer.data.readers import iter_rows

TEXT = RowKeys(text_key="text")
TOKENIZER = fixtures.make_tokenizer(None)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
CHAT = json.dumps([USER, ASSISTANT])


def with_bos():
    tokenizer = fixtures.make_tokenizer(None, eos_token="</s>")
    bos = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", "<s> $A $B", bos
    )
    return tokenizer


PACK = {
    "a.jsonl": bytes,
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": functools.partial(pa.compress, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("name", PACK)
def test_lines_may_be_packed_and_have_bom_crlf_blank_lines_and_no_final_newline(tmp_path, name):
    path = tmp_path / name
    raw = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xf0\x9f\x99\x82"}'
    path.write_bytes(PACK[name](raw[:9]) + PACK[name](raw[9:]))  # as `cat a.gz b.gz` makes it
    rows = [(row.line, row.record) for row in iter_rows(path, ())]
    assert rows == [(1, {"a": 1}), (4, {"a": "🙂"})]


PAIR = RowKeys(prompt_key="extra.question", response_key="extra.answer")
SYSTEM = '{"role": "system", "content": "be kind"}'
CALL = '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
RECOGNISED = {
    "nested pair": ('{"extra": {"question": "hi", "answer": "hello"}}', PAIR, CHAT),
    "pair with a chat": (
        f'{{"extra": {{"question": [{SYSTEM}, {json.dumps(USER)}], "answer": "hello"}}}}',
        PAIR,
        f"[{SYSTEM}, {CHAT[1:]}",
    ),
    "messages as text": (json.dumps({"messages": CHAT}), CHATS, CHAT),
    "sharegpt": (
        """{"system": "be kind", "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": "{\\"name\\": \\"f\\", \\"arguments\\": {\\"x\\": 1}}"},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "hello"}]}""",
        CHATS,
        f"""[{SYSTEM}, {{"role": "user", "content": "hi"}},
            {{"role": "assistant", "content": "", "tool_calls": [{CALL}]}},
            {{"role": "tool", "content": "2"}}, {{"role": "assistant", "content": "hello"}}]""",
    ),
    "alpaca": (
        """{"instruction": "add", "input": "1 2", "output": "3", "system": "be kind",
            "history": [["hi", "hello"]]}""",
        CHATS,
        f"""[{SYSTEM}, {CHAT[1:-1]}, {{"role": "user", "content": "add\\n1 2"}},
            {{"role": "assistant", "content": "3"}}]""",
    ),
}


@pytest.mark.parametrize(("row", "keys", "expected"), RECOGNISED.values(), ids=RECOGNISED)
def test_chats_of_every_format_become_messages(row, keys, expected):
    assert messages_of(row, keys) == json.loads(expected)


def test_messages_keep_extra_keys_join_text_parts_and_drop_nulls():
    row = """{"chat": {"turns": [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
         "name": null},
        {"role": "assistant", "content": "hello", "reasoning_content": "hm"}]},
        "functions": "[{\\"type\\": \\"function\\"}]"}"""
    assert parsed(row, RowKeys(messages_key="chat.turns", tools_key="functions")) == Conversation(
        [{"role": "user", "content": "a b"}, {**ASSISTANT, "reasoning_content": "hm"}],
        [{"type": "function"}],
        untrained=frozenset(),
    )


@pytest.mark.parametrize(
    ("row", "keys", "part"),
    [
        ('{"question": "a", "answer": "b"}', CHATS, "data.prompt_key=question data.response_key=answer"),
        ('{"x": {"Query": "a", "response": "b"}}', CHATS, "data.prompt_key=x.Query data.response_key=x.response"),
        (f'{{"dialog": {CHAT}}}', CHATS, "to read 'dialog' as messages, set data.messages_key=dialog"),
        ('{"x": {"Text": "a"}, "id": 1}', CHATS, "to read 'x.Text' as plain text, set data.text_key=x.Text"),
        ('{"id": 1}', CHATS, "for single-turn columns set data.prompt_key and data.response_key"),
        ('{"extra": {"question": "hi"}}', PAIR,
         "found 'extra.question'; tried 'extra.answer' (data.response_key), which is missing or null"),
        (json.dumps({f"column{i}": 0 for i in range(50)}), CHATS, "'column29'; tried"),
    ],
)  # fmt: skip
def test_unrecognised_columns_are_named_with_the_override_that_fits(row, keys, part):
    reason = str(parsed(row, keys))
    assert reason.startswith("unrecognised columns: ") and part in reason


@pytest.mark.parametrize(
    ("row", "keys", "has_bos", "expected"),
    [
        ('{"text": "Two words.\\n"}', TEXT, False, "[[Two words.\n<|im_end|>]]"),
        ('{"text": "Two words."}', TEXT, True, "<s>[[Two words.</s>]]"),
        # not ended twice
        ('{"a": {"b": "rendered</s>"}}', RowKeys(text_key="a.b"), True, "<s>[[rendered</s>]]"),
        ('{"prompt": "The quick brown", "completion": " fox"}', CHATS, False, "The quick brown[[ fox<|im_end|>]]"),
        ('{"prompt": "The quick brown ", "completion": "fox"}', CHATS, False, "The quick brown [[fox<|im_end|>]]"),
        ('{"prompt": "ques", "completion": "tion"}', CHATS, False, "ques[[tion<|im_end|>]]"),
        ('{"prompt": "", "completion": "fox", "id": 3}', CHATS, False, "[[fox<|im_end|>]]"),
        ('{"prompt": "one", "completion": ""}', CHATS, False, "empty text: there is nothing to supervise"),
    ],
)  # fmt: skip
def test_plain_text_is_trained_behind_its_prompt_or_the_tokenizers_beginning(
    row, keys, has_bos, expected
):
    assert marked(row, with_bos() if has_bos else TOKENIZER, keys) == [expected]


def test_special_tokens_in_a_text_are_parsed_as_asked():
    row = {"text": "<s>one <|im_start|>"}
    parsed = marked(row, with_bos(), TEXT, special_in_content="parse")
    assert parsed == ["[[<s>one <|im_start|></s>]]"]


def test_two_lists_of_messages_train_the_second():
    tokenizer = fixtures.make_tokenizer(fixtures.CHATML)
    bye = {"role": "assistant", "content": "bye"}
    [text] = marked({"prompt": [USER, ASSISTANT, USER], "completion": [bye]}, tokenizer)
    assert text.count("[[") == 1 and text.endswith("<|im_start|>assistant\n[[bye<|im_end|>]]\n")


TURNS = '"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]'


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (f'{{"messages": {CHAT}, "system": "Be brief.", "prompt": "hi"}}', "system prompt"),
        (f'{{"messages": {CHAT}, "system": "", "prompt": null, "tools": []}}', ""),
        (f'{{"messages": {CHAT}, "input_ids": [1], "labels": [1]}}', "input_ids labels"),
        (f'{{{TURNS}, "system": "Be brief.", "input": "c"}}', "input"),
        ('{"instruction": "a", "output": "b", "history": [], "system": "s", "labels": [1]}', "labels"),
        ('{"prompt": "a", "completion": " b", "system": "Be brief."}', "system"),
    ],
)  # fmt: skip
def test_a_column_that_only_rows_of_another_shape_have_is_named(row, unread):
    """Each of these was lost without a message."""
    samples, seen = encoded(row, fixtures.make_tokenizer())
    assert not isinstance(samples, str)
    assert seen.unread_columns == dict.fromkeys(unread.split(), 1)


IDS = [*TOKENIZER.encode("hello"), TOKENIZER.eos_token_id]
NUM_IDS = len(IDS)
DIGEST = vocabulary_digest(TOKENIZER)
HIDDEN = [-100, *IDS[1:]]
TOLD = {"vocabulary_digest": DIGEST}
EXPECTED = f"{TOKENIZER.decode(IDS[:1])}[[{TOKENIZER.decode(IDS[1:])}]]"
MASK = [0] + [1] * (NUM_IDS - 1)
TOKEN_ROWS = [
    ({"labels": HIDDEN, **TOLD}, EXPECTED),
    ({"loss_mask": MASK, "attention_mask": [1] * NUM_IDS, **TOLD}, EXPECTED),
    ({"loss_mask": list(map(bool, MASK)), "labels": HIDDEN, **TOLD}, EXPECTED),
    ({"labels": HIDDEN}, f"unknown vocabulary: .* add the column with the value '{DIGEST}'"),
    ({"labels": [*IDS[1:], -100], **TOLD}, "bad tokens: 'labels' has .* at position 1; .*not the next token's"),
    ({"loss_mask": [2] * NUM_IDS, **TOLD}, "bad tokens: 'loss_mask' has 2 at position 1; allowed: 0 and 1"),
    ({"loss_mask": [1] * NUM_IDS, "labels": HIDDEN, **TOLD}, "bad tokens: .* mark different tokens"),
    (TOLD, "bad tokens: 'input_ids' requires a 'loss_mask' or 'labels' column"),
    ({"input_ids": [-1], "labels": [-100], **TOLD}, "bad tokens: 'input_ids' has -1"),
    *[({"input_ids": ids, "labels": [1], **TOLD}, "bad tokens: 'input_ids' is not a list of 32-bit integers")
      for ids in ([9**30], [9**15], [[1], [2, 3]], None)],
]  # fmt: skip


@pytest.mark.parametrize(("columns", "expected"), TOKEN_ROWS)
def test_rows_of_tokens_are_taken_over_or_refused(columns, expected):
    row = {"input_ids": IDS, **columns}
    [found] = marked(row, TOKENIZER)
    assert found == expected or re.match(expected, found), found
    if expected is EXPECTED:
        assert encoded(row, TOKENIZER)[1].end_token_ids == {TOKENIZER.eos_token_id}
