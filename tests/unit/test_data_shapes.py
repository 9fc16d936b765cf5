"""Rows that are no chats: plain text, TRL's prompt and completion, and tokens that were made
elsewhere.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizer_fixtures as fixtures
from prepared import OPTIONS, run, write_rows
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from trainer.config import RowKeys
from trainer.data.chat import ChatEncoder
from trainer.data.formats import RowParser, vocabulary_digest
from trainer.data.rows import Row, Summary, UnusableError
from trainer.data.show import preview

TEXT = RowKeys(text_key="text")
TOKENIZER = fixtures.make_tokenizer(None)
DIGEST = vocabulary_digest(TOKENIZER)
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def with_bos() -> PreTrainedTokenizerFast:
    tokenizer = fixtures.make_tokenizer(None, eos_token="</s>")
    bos = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", "<s> $A $B", bos
    )
    return tokenizer


def marked(
    record: dict[str, Any],
    keys: RowKeys = TEXT,
    *,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    special: str = "error",
) -> str:
    """What is trained of a row, in double brackets, or why nothing is."""
    parser = RowParser(keys, tokenizer)
    encoder = ChatEncoder(tokenizer, template_kwargs={}, special_in_content=special)
    (found,) = encoder.encode([parser.parse(Row(Path("a.jsonl"), 1, record))])
    if isinstance(found, UnusableError):
        return str(found)
    (sample,) = found
    return preview(sample.input_ids, sample.loss_mask, tokenizer, color=False)


def test_a_text_is_trained_as_a_whole_behind_the_tokenizers_beginning() -> None:
    assert marked({"text": "Two words.\n"}) == "[[Two words.\n<|im_end|>]]"
    assert marked({"text": "Two words."}, tokenizer=with_bos()) == "<s>[[Two words.</s>]]"
    ended = {"a": {"b": "rendered</s>"}}
    assert marked(ended, RowKeys(text_key="a.b"), tokenizer=with_bos()) == "<s>[[rendered</s>]]", (
        "not ended twice"
    )


def test_special_tokens_in_a_text_are_refused_or_taken_as_asked() -> None:
    row = {"text": "<s>one <|im_start|>"}
    reason = marked(row, tokenizer=with_bos())
    assert reason.startswith(
        "special token in content: the text contains '<s>'; remove it, or set data.special_in"
    )
    assert marked(
        row, tokenizer=with_bos(), special="parse"
    ) == "<s>[[one <|im_start|></s>]]".replace("<s>[[", "[[<s>")
    encoder = ChatEncoder(with_bos(), template_kwargs={}, special_in_content="text")
    ((sample,),) = encoder.encode([RowParser(TEXT, with_bos()).parse(Row(Path("a"), 1, row))])
    specials = set(with_bos().convert_tokens_to_ids(["<s>", "<|im_start|>"]))
    assert [token for token in sample.input_ids.tolist() if token in specials] == [
        sample.input_ids[0]
    ]
    assert encoder.seen.end_token_ids == {with_bos().eos_token_id}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "The quick brown", "completion": " fox"}, "The quick brown[[ fox<|im_end|>]]"),
        ({"prompt": "The quick brown ", "completion": "fox"}, "The quick brown [[fox<|im_end|>]]"),
        ({"prompt": "ques", "completion": "tion"}, "ques[[tion<|im_end|>]]"),
        ({"prompt": "", "completion": "fox", "id": 3}, "[[fox<|im_end|>]]"),
        ({"prompt": "one", "completion": ""}, "empty text: there is nothing to supervise"),
        (
            {"prompt": "one", "completion": None},
            "unrecognised columns: found 'prompt', 'completion'; tried",
        ),
        ({"text": "\ud800"}, "unrecognised columns: found 'text'"),
    ],
)
def test_two_texts_are_a_prompt_and_what_is_trained_behind_it(
    record: dict[str, Any], expected: str
) -> None:
    assert marked(record, RowKeys()).startswith(expected)


def test_a_prompts_tokens_are_those_of_the_prompt_alone() -> None:
    prompt, encoder = "The quick ", ChatEncoder(TOKENIZER, template_kwargs={})
    row = Row(Path("a"), 1, {"prompt": prompt, "completion": "brown"})
    ((sample,),) = encoder.encode([RowParser(RowKeys(), TOKENIZER).parse(row)])
    alone = TOKENIZER.encode(prompt)
    assert (
        sample.input_ids[: len(alone)].tolist()
        == alone
        != TOKENIZER.encode(prompt + "brown")[: len(alone)]
    )
    assert not sample.loss_mask[: len(alone)].any() and sample.loss_mask[len(alone) :].all()


def test_two_lists_of_messages_train_the_second() -> None:
    tokenizer = fixtures.make_tokenizer(fixtures.CHATML)
    row = {
        "prompt": [USER, ASSISTANT, USER],
        "completion": [{"role": "assistant", "content": "bye"}],
    }
    text = marked(row, RowKeys(), tokenizer=tokenizer)
    assert text.count("[[") == 1 and text.endswith("<|im_start|>assistant\n[[bye<|im_end|>]]\n")
    mixed = {"prompt": [USER], "completion": "bye"}
    assert "data.prompt_key=prompt data.response_key=completion" in marked(
        mixed, RowKeys(), tokenizer=tokenizer
    )


def test_chats_come_before_other_columns(tmp_path: Path) -> None:
    both = {
        "messages": [USER, ASSISTANT],
        "prompt": "a",
        "completion": "b",
        "input_ids": [1],
        "labels": [1],
    }
    other = {"prompt": "a", "completion": "b"}
    dataset = run(
        write_rows(tmp_path / "rows.jsonl", both, other),
        replace(OPTIONS, keys=RowKeys()),
        cache=tmp_path,
    )
    (chat, texts), counts = dataset.summary.rows_by_shape, [*dataset.summary.rows_by_shape.values()]
    assert (
        chat == "messages in 'messages'"
        and texts.startswith("plain text in 'prompt'")
        and counts == [1, 1]
    )


ALPACA = {"instruction": "a", "output": "b", "input": "", "history": []}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        (
            {"messages": [USER, ASSISTANT], "system": "Be brief.", "prompt": "hi"},
            {"system": 1, "prompt": 1},
        ),
        ({"messages": [USER, ASSISTANT], "system": "", "prompt": None, "tools": []}, {}),
        ({"conversations": TURNS, "system": "Be brief.", "input": "c"}, {"input": 1}),
        ({**ALPACA, "system": "Be brief.", "labels": [1]}, {"labels": 1}),
        ({"prompt": "a", "completion": " b", "system": "Be brief."}, {"system": 1}),
    ],
)
def test_a_column_that_only_rows_of_another_shape_have_is_named(
    record: dict[str, Any], unread: dict[str, int]
) -> None:
    """Each was lost without a word."""
    seen = Summary()
    item = RowParser(RowKeys(), TOKENIZER, seen=seen).parse(Row(Path("a"), 1, record))
    assert not isinstance(item, UnusableError) and seen.unread_columns == unread


def test_a_row_that_is_nested_deeply_is_a_bad_one() -> None:
    deep: Any = "a"
    for _ in range(2000):
        deep = {"b": deep}
    item = RowParser(RowKeys(), TOKENIZER).parse(Row(Path("a"), 1, {"text": deep}))
    assert str(item).startswith("nested too deeply: ")


IDS = [*TOKENIZER.encode("hello"), TOKENIZER.eos_token_id]
HIDDEN = [-100, *IDS[1:]]
TOLD = {"vocabulary_digest": DIGEST}
EXPECTED = f"{TOKENIZER.decode(IDS[:1])}[[{TOKENIZER.decode(IDS[1:])}]]"
TOKEN_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"labels": HIDDEN, **TOLD}, EXPECTED),
    ({"loss_mask": [0] + [1] * (len(IDS) - 1), "attention_mask": [1] * len(IDS), **TOLD}, EXPECTED),
    ({"loss_mask": [False] + [True] * (len(IDS) - 1), "labels": HIDDEN, **TOLD}, EXPECTED),
    ({"labels": HIDDEN}, f"unknown vocabulary: .* add a column vocabulary_digest with '{DIGEST}'"),
    (
        {"labels": HIDDEN, "vocabulary_digest": "0"},
        f"other vocabulary: .*'0', this model's is '{DIGEST}'",
    ),
    (
        {"labels": [*IDS[1:], -100], **TOLD},
        "bad tokens: 'labels' has .* at position 1, .*not that of the next",
    ),
    (
        {"labels": HIDDEN[1:], **TOLD},
        f"bad tokens: 'labels' has {len(IDS) - 1} values for {len(IDS)}",
    ),
    ({"loss_mask": [0.5] * len(IDS), **TOLD}, "bad tokens: 'loss_mask' is not a list of integers"),
    (
        {"loss_mask": [2] * len(IDS), **TOLD},
        "bad tokens: 'loss_mask' has 2 at position 1, known are 0 and 1",
    ),
    (
        {"loss_mask": [1] * len(IDS), "labels": HIDDEN, **TOLD},
        "bad tokens: .* supervise different tokens",
    ),
    (TOLD, "bad tokens: 'input_ids' needs a column 'loss_mask' or 'labels'"),
    ({"input_ids": [-1], "labels": [-100], **TOLD}, "bad tokens: 'input_ids' has -1"),
    (
        {"input_ids": [9**9], "labels": [-100], **TOLD},
        "bad tokens: 'input_ids' has 387420489 at position 1, known are 0 to",
    ),
    (
        {"input_ids": [9**30], "labels": [-100], **TOLD},
        "bad tokens: 'input_ids' is not a list of integers",
    ),
    (
        {"input_ids": [9**15], "labels": [-100], **TOLD},
        "bad tokens: 'input_ids' has integers of more than 32 bits",
    ),
    (
        {"input_ids": [[1], [2, 3]], "labels": [1], **TOLD},
        "bad tokens: 'input_ids' is not a list of integers",
    ),
    ({"input_ids": [], "labels": [], **TOLD}, "bad tokens: 'input_ids' is an empty list"),
]


@pytest.mark.parametrize(
    ("columns", "expected"), TOKEN_ROWS, ids=[expected[:50] for _, expected in TOKEN_ROWS]
)
def test_rows_of_tokens_are_taken_over_or_refused(columns: dict[str, Any], expected: str) -> None:
    found = marked({"input_ids": IDS, **columns}, RowKeys())
    assert found == expected or re.match(expected, found), found


def test_rows_of_tokens_are_prepared(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS, "labels": HIDDEN, **TOLD})
    dataset = run(path, replace(OPTIONS, keys=RowKeys()), cache=tmp_path)
    ids, mask = dataset.sample(0)
    assert ids.tolist() == IDS and mask.tolist() == [False] + [True] * (len(IDS) - 1)
    assert dataset.summary.end_token_ids == {TOKENIZER.eos_token_id}
    text = run(
        write_rows(tmp_path / "t.jsonl", {"text": "a"}), replace(OPTIONS, keys=TEXT), cache=tmp_path
    )
    assert (
        text.directory != dataset.directory
        and text.summary.num_loss_tokens == len(text.sample(0)[0]) - 1
    )
