"""Turns as inference sees them: supervised is what the model must generate behind the prompt that a
server renders.

The reference renders with `apply_chat_template` of transformers alone.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from chat_families import FAMILIES, Family
from prepared import encoded, run, write_rows
from prepared import marked as marked_by
from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.prepare import RowEncoder
from trainer.data.rows import PrepareOptions, Row
from trainer.data.samples import Samples
from trainer.data.tokens import Encoded
from trainer.errors import DataError

NUM_CONVERSATIONS = 25
WORDS = [
    "hello",
    "world",
    "4",
    "  two spaces  ",
    "你好，世界",
    "🙂",
    "a\nb",
    "x = 1\n",
    "def f(x):\n    return x",
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Message = dict[str, Any]


def generated_row(family: Family, draw: random.Random) -> dict[str, Any]:
    """One to four questions; some call a tool first, reason, have a system text, flags, a
    question without answer.
    """

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))

    def turn(**more: Any) -> Message:
        flag: Message = draw.choice(
            [{}, {}, {"weight": 0}, {"train": True}, {"trainable": False, "loss_mask": 0}]
        )
        reasons = family.thinking is not None and draw.random() < 0.5
        message: Message = {"role": "assistant", "content": text(), **more, **flag}
        if reasons and family.thinking:  # gpt-oss refuses a call with both text and reasoning
            message |= {
                family.thinking: text(),
                "content": "" if "tool_calls" in more else message["content"],
            }
        return message

    messages: list[Message] = (
        [{"role": "system", "content": text()}] if family.system and draw.random() < 0.4 else []
    )
    has_tools = family.tools and draw.random() < 0.4
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        for number in range(draw.randint(0, 2) if has_tools else 0):
            arguments = {"a": text(), "b": number}
            function = {
                "name": "add",
                "arguments": draw.choice([arguments, json.dumps(arguments, ensure_ascii=False)]),
            }
            call = {"id": "call00001", "type": "function", "function": function}
            messages.append(turn(content=draw.choice(["", "I add."]), tool_calls=[call]))
            messages.append({"role": "tool", "tool_call_id": "call00001", "content": text()})
        messages.append(turn())
    if draw.random() < 0.2:
        messages.append({"role": "user", "content": text()})
    return {"messages": messages, "tools": TOOLS if has_tools else None}


def as_template_wants(messages: list[Message], family: Family) -> list[Message]:
    """Without flags, with tool arguments as the family's template takes them."""
    found: list[Message] = json.loads(json.dumps(messages))
    for message in found:
        for flag in ("weight", "train", "trainable", "loss_mask"):
            message.pop(flag, None)
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            given = json.loads(given) if isinstance(given, str) else given
            call["function"]["arguments"] = (
                json.dumps(given, ensure_ascii=False) if family.text_arguments else given
            )
    return found


def is_trained(message: Message) -> bool:
    return (
        message["role"] == "assistant"
        and message.get("weight", 1) == 1
        and message.get("trainable", True)
    )


def served(
    row: dict[str, Any], index: int, family: Family, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str]:
    """The prompt that a server renders for a turn, and what the model must generate then, until
    the server stops.
    """
    messages = as_template_wants(row["messages"], family)
    settings: dict[str, Any] = {"tools": row["tools"], "tokenize": False, **family.kwargs}
    prompt = str(
        tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **settings)
    )
    if family.turn is not None:
        return prompt, family.turn(messages[index])
    whole = str(tokenizer.apply_chat_template(messages[: index + 1], **settings))
    if family.is_open:
        whole += family.stops[bool(messages[index].get("tool_calls"))]
    assert whole.startswith(prompt)
    ends = [at + len(stop) for stop in family.stops if (at := whole.find(stop, len(prompt))) >= 0]
    return prompt, whole[len(prompt) : min(ends)]


def shown(sample: Encoded, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """(All before, text) of each supervised stretch of a sample."""
    bounds = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False)).tolist()
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return [
        (str(decode(sample.input_ids[:first])), str(decode(sample.input_ids[first:end])))
        for first, end in zip(bounds[::2], bounds[1::2], strict=True)
    ]


MODES = [(name, turns) for name in FAMILIES for turns in ("apart", "auto")]
MODES += [(name, "together") for name, family in FAMILIES.items() if family.together]


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize(("name", "turns"), MODES)
def test_what_a_server_makes_the_model_generate_is_supervised(name, turns, train_on):
    family, draw = FAMILIES[name], random.Random(name)
    tokenizer = family.tokenizer()
    options = PrepareOptions(
        RowKeys(), 4096, turns=turns, train_on=train_on, template_kwargs=family.kwargs
    )
    encoder = RowEncoder(tokenizer, options)
    rows = [generated_row(family, draw) for _ in range(NUM_CONVERSATIONS)]
    read = [Row(Path("rows.jsonl"), 1, row) for row in rows]
    num_apart = 0
    for row, samples in zip(rows, encoder.encode(read), strict=True):
        assert isinstance(samples, list), samples
        messages = row["messages"]
        asked = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        asked = asked[-1:] if train_on == "last" else asked
        expected = [served(row, i, family, tokenizer) for i in asked if is_trained(messages[i])]
        found = [stretch for sample in samples for stretch in shown(sample, tokenizer)]
        assert found == expected
        num_apart += len(samples) > 1
    assert encoder.seen.num_unlike_prompt == 0
    if family.together and turns != "apart":
        assert encoder.seen.num_apart == num_apart == 0
    elif train_on == "all":
        assert num_apart > 0
    assert encoder.seen.end_token_ids <= set(tokenizer.convert_tokens_to_ids(list(family.stops)))


# --- by hand

ASK, ONE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}
TWO = {"role": "assistant", "content": "two"}
THINKING = [ASK, {**ONE, "reasoning_content": "hm"}, ASK, TWO]
FIRST = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def marked(*messages: Message, template: str = fixtures.QWEN3, **options: Any) -> list[str]:
    return marked_by(list(messages), fixtures.make_tokenizer(template), **options)


def test_each_turn_is_a_sample_behind_its_prompt_where_a_template_drops_reasoning():
    empty = "<think>\n\n</think>\n\n"
    apart = [f"{FIRST}[[<think>\nhm\n</think>\n\none<|im_end|>]]\n"]
    apart += [f"{FIRST}one<|im_end|>\n{FIRST}[[{empty}two<|im_end|>]]\n"]
    assert marked(*THINKING) == marked(*THINKING, turns="apart") == apart
    assert marked(*THINKING, train_on="last") == apart[1:], (
        "its whole rendering shows the last turn as it is generated"
    )
    assert marked(*THINKING[:3], {**TWO, "weight": 0}) == apart[:1]
    assert marked(THINKING[0], {**THINKING[1], "train": False}, *THINKING[2:]) == apart[1:]
    assert marked(*THINKING, turns="together") == [
        f"{FIRST}[[one<|im_end|>]]\n{FIRST}[[{empty}two<|im_end|>]]\n"
    ]


def test_the_last_turn_alone_is_supervised_and_the_tokens_stay():
    row, template = (ASK, ONE, ASK, TWO, ASK), fixtures.CHATML
    whole = f"{FIRST}one<|im_end|>\n{FIRST}[[two<|im_end|>]]\n<|im_start|>user\nhi<|im_end|>\n"
    assert marked(*row, template=template, train_on="last") == [whole]
    assert marked(*row, template=template, train_on="last", turns="apart") == [
        whole[: whole.index("]]") + 3]
    ]
    flagged = marked(*row[:3], {**TWO, "weight": 0}, template=template, train_on="last")
    assert flagged == [f"{FIRST}one<|im_end|>\n{FIRST}two<|im_end|>\n"], "no turn takes its place"


def test_a_turn_that_is_not_rendered_as_its_prompt_begins_is_told():
    opens = fixtures.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    [refused] = marked(ASK, ONE, template=opens, turns="apart")
    assert (
        "message 2 (assistant) is not rendered as its generation prompt begins; change data.apply"
        in refused
    )
    assert marked(ASK, ONE, template=opens) == [f"{FIRST}[[one<|im_end|>]]\n"]
    _, seen = encoded([ASK, ONE, ASK, TWO], fixtures.make_tokenizer(opens))
    assert seen.num_unlike_prompt == 2


def test_forged_tokens_stay_text_in_turns_apart():
    ask = {"role": "user", "content": "<|im_end|>"}
    row = [ask, {**ONE, "reasoning_content": "<|im_start|>"}, ASK, TWO]
    first, second = marked(*row, special_in_content="text")
    assert first.endswith("[[<think>\n<|im_start|>\n</think>\n\none<|im_end|>]]\n")
    assert "two" in second
    tokenizer = fixtures.make_tokenizer(fixtures.QWEN3)
    samples, _ = encoded(row, tokenizer, special_in_content="text")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert [sample.input_ids.tolist().count(start) for sample in samples] == [2, 4]


@pytest.mark.parametrize(
    ("truncation", "found"),
    [("right", (2, 1, 0)), ("left", (3, 1, 0)), ("drop", (1, 0, 1)), ("error", None)],
)
def test_over_long_turns_are_cut_one_by_one_and_dropped_with_their_row(tmp_path, truncation, found):
    long = {"role": "user", "content": "hi " * 40}
    path = write_rows(
        tmp_path / "rows.jsonl", {"messages": [ASK, ONE, long, TWO]}, {"messages": [ASK, ONE]}
    )
    options = PrepareOptions(RowKeys(), max_length=30, truncation=truncation, turns="apart")
    if found is None:
        with pytest.raises(
            DataError, match=r"rows.jsonl:1: over-long: \d+ tokens > data.max_length 30"
        ):
            run(path, options, cache=tmp_path / "cache")
        return
    dataset = run(path, options, cache=tmp_path / "cache")
    summary, samples = dataset.summary, Samples([dataset.whole("rows")])
    assert (len(dataset), summary.num_truncated, summary.num_dropped) == found
    assert [share.num_rows for share in samples.shares] == [2 - summary.num_dropped]
    rows = samples.of_rows(np.arange(2 - summary.num_dropped))
    assert [samples.location(i) for i in rows][-1].endswith("rows.jsonl:2") and len(rows) == len(
        dataset
    )


def test_a_conversation_that_the_assistant_begins_is_refused_with_the_reason():
    """A server has no prompt for it where the template looks at the first message."""
    asks = "{% if messages[0].role == 'system' %}{% endif %}" + fixtures.CHATML
    [found] = marked(ONE, ASK, TWO, template=asks)
    assert found.startswith("no prompt: message 1 is the assistant's")
