"""Turns as in inference: the supervised text is what the model must generate after the prompt that
a server renders.

The reference renders with `apply_chat_template` of transformers only.
"""

import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from chat_families import FAMILIES
from prepared import marked as marked_by
from prepared import run_rows

from trainer.config import RowKeys
from trainer.data.chat import RowEncoder
from trainer.data.rows import PrepareOptions, Row

NUM_CONVERSATIONS = 12
WORDS = [
    "hello",
    "4",
    "  two spaces  ",
    "你好，世界",
    "🙂",
    "a\nb",
    "x = 1\n",
    "def f(x):\n    return x",
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def generated_row(family, draw):
    """One to four questions. Some have tool calls, reasoning, a system text, or a question without
    an answer.
    """

    def said(role, **more):
        return {
            "role": role,
            "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 4))),
            **more,
        }

    def answer(*calls):
        message = said("assistant")
        if calls:
            message |= {"content": draw.choice(["", "I add."]), "tool_calls": list(calls)}
        if family.thinking and draw.random() < 0.5:
            message[family.thinking] = said("")["content"]
            if calls:  # gpt-oss refuses a call with both text and reasoning
                message["content"] = ""
        return message

    messages = []
    if family.system and draw.random() < 0.4:
        messages.append(said("system"))
    has_tools = family.tools and draw.random() < 0.4
    for _ in range(draw.randint(1, 4)):
        messages.append(said("user"))
        for number in range(draw.randint(0, 2) if has_tools else 0):
            arguments = {"a": said("")["content"], "b": number}
            as_text = json.dumps(arguments, ensure_ascii=False)
            function = {"name": "add", "arguments": draw.choice([arguments, as_text])}
            messages.append(answer({"id": "call00001", "type": "function", "function": function}))
            messages.append(said("tool", tool_call_id="call00001"))
        messages.append(answer())
    if draw.random() < 0.2:
        messages.append(said("user"))
    return {"messages": messages, "tools": TOOLS if has_tools else None}


def as_template_wants(messages, family):
    """Return the messages with tool arguments in the form that the family's template accepts."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            given = json.loads(given) if isinstance(given, str) else given
            as_text = json.dumps(given, ensure_ascii=False)
            call["function"]["arguments"] = as_text if family.text_arguments else given
    return found


def served(row, index, family, tokenizer):
    """Return the prompt that a server renders for a turn, and the text that the model must then
    generate until the server stops.
    """
    messages = as_template_wants(row["messages"], family)
    settings = {"tools": row["tools"], "tokenize": False, **family.kwargs}
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


def shown(sample, tokenizer):
    """Return (text before, text) of each supervised stretch of a sample."""
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
    family = FAMILIES[name]
    draw = random.Random(name)
    tokenizer = family.tokenizer()
    options = PrepareOptions(
        RowKeys(), 4096, turns=turns, train_on=train_on, template_kwargs=family.kwargs
    )
    encoder = RowEncoder(tokenizer, options)
    rows = [generated_row(family, draw) for _ in range(NUM_CONVERSATIONS)]
    num_apart = 0
    for row in rows:
        samples = encoder.encode(Row(Path("rows.jsonl"), 1, row))
        messages = row["messages"]
        asked = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        asked = asked[-1:] if train_on == "last" else asked
        expected = [served(row, i, family, tokenizer) for i in asked]
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

ASK = {"role": "user", "content": "hi"}
ONE = {"role": "assistant", "content": "one"}
TWO = {"role": "assistant", "content": "two"}
THINKING = [ASK, {**ONE, "reasoning_content": "hm"}, ASK, TWO]
FIRST = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def marked(*messages, template=fixtures.QWEN3, **options):
    return marked_by(list(messages), fixtures.make_tokenizer(template), **options)


def test_each_turn_is_a_sample_behind_its_prompt_where_a_template_drops_reasoning():
    empty = "<think>\n\n</think>\n\n"
    apart = [f"{FIRST}[[<think>\nhm\n</think>\n\none<|im_end|>]]\n"]
    apart += [f"{FIRST}one<|im_end|>\n{FIRST}[[{empty}two<|im_end|>]]\n"]
    assert marked(*THINKING) == marked(*THINKING, turns="apart") == apart
    assert marked(*THINKING, train_on="last") == apart[1:]
    assert marked(*THINKING[:3], {**TWO, "weight": 0}) == apart[:1]
    assert marked(THINKING[0], {**THINKING[1], "train": False}, *THINKING[2:]) == apart[1:]
    assert marked(*THINKING, turns="together") == [
        f"{FIRST}[[one<|im_end|>]]\n{FIRST}[[{empty}two<|im_end|>]]\n"
    ]


def test_a_turn_that_is_not_rendered_as_its_prompt_begins_is_told():
    opens = fixtures.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    [refused] = marked(ASK, ONE, template=opens, turns="apart")
    assert (
        "message 2 (assistant) does not begin with the header of the generation prompt" in refused
    )
    assert marked(ASK, ONE, template=opens) == [f"{FIRST}[[one<|im_end|>]]\n"]


SHOUTS_LATER = fixtures.CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last or message['role'] == 'user' else message['content'] | upper) +",
)


def test_a_turn_that_is_rewritten_in_the_same_length_is_a_sample_of_its_own():
    assert marked(ASK, ONE, ASK, TWO, template=SHOUTS_LATER) == [
        f"{FIRST}[[one<|im_end|>]]\n",
        f"{FIRST}ONE<|im_end|>\n{FIRST}[[two<|im_end|>]]\n",
    ]


CALLS_WITHOUT_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_a_turn_after_a_call_whose_text_is_null_is_rendered():
    """This crashed if the turn did not begin with the end of its prompt."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    [text] = marked(ASK, calling, ONE, template=CALLS_WITHOUT_TEXT)
    assert text.endswith("<|im_start|>assistant\n[[one<|im_end|>]]\n")


@pytest.mark.parametrize(
    ("truncation", "found"), [("right", (2, 1, 0)), ("left", (3, 1, 0)), ("drop", (1, 0, 1))]
)
def test_over_long_turns_are_cut_one_by_one_and_dropped_with_their_row(tmp_path, truncation, found):
    long = {"role": "user", "content": "hi " * 40}
    rows = [{"messages": [ASK, ONE, long, TWO]}, {"messages": [ASK, ONE]}]
    options = {"keys": RowKeys(), "max_length": 30, "truncation": truncation, "turns": "apart"}
    dataset = run_rows(tmp_path, *rows, **options)
    summary = dataset.summary
    assert (len(dataset), summary.num_truncated, summary.num_dropped) == found
    assert summary.num_kept_rows == 2 - summary.num_dropped
    assert dataset.location(len(dataset) - 1).endswith("rows.jsonl:2")
