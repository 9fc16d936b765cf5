"""Turns as inference sees them: supervised is what the model must generate behind the prompt that a server renders.

The reference renders with `apply_chat_template` of transformers alone.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, Family
from transformers import PreTrainedTokenizerBase

from trainer.data.chat import ChatEncoder, Encoded
from trainer.data.conversation import RowKeys, to_conversation
from trainer.data.rows import Row

NUM_CONVERSATIONS = 25
WORDS = ["hello", "world", "4", "  two spaces  ", "你好，世界", "🙂", "a\nb", "x = 1\n", "def f(x):\n    return x"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Message = dict[str, Any]


def generated_row(family: Family, draw: random.Random) -> dict[str, Any]:
    """One to four questions; some call a tool first, reason, have a system text, flags, a question without answer."""

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))

    def turn(**more: Any) -> Message:
        flag = draw.choice([{}, {}, {"weight": 0}, {"train": True}, {"trainable": False, "loss_mask": 0}])
        reasons = family.thinking is not None and draw.random() < 0.5
        message = {"role": "assistant", "content": text(), **more, **flag}
        if reasons:  # gpt-oss refuses a call with both text and reasoning
            message |= {family.thinking: text(), "content": "" if "tool_calls" in more else message["content"]}
        return message

    messages: list[Message] = [{"role": "system", "content": text()}] if family.system and draw.random() < 0.4 else []
    has_tools = family.tools and draw.random() < 0.4
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        for number in range(draw.randint(0, 2) if has_tools else 0):
            arguments = {"a": text(), "b": number}
            function = {"name": "add", "arguments": draw.choice([arguments, json.dumps(arguments, ensure_ascii=False)])}
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
            call["function"]["arguments"] = json.dumps(given, ensure_ascii=False) if family.text_arguments else given
    return found


def is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1 and message.get("trainable", True)


def served(row: dict[str, Any], index: int, family: Family, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt that a server renders for a turn, and what the model must generate then, until the server stops."""
    messages = as_template_wants(row["messages"], family)
    settings: dict[str, Any] = {"tools": row["tools"], "tokenize": False, **family.kwargs}
    prompt = str(tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **settings))
    if family.turn is not None:
        return prompt, family.turn(messages[index])
    whole = str(tokenizer.apply_chat_template(messages[: index + 1], **settings))
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
def test_what_a_server_makes_the_model_generate_is_supervised(name: str, turns: str, train_on: str) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    tokenizer = family.tokenizer()
    encoder = ChatEncoder(tokenizer, template_kwargs=family.kwargs, turns=turns, train_on=train_on)
    rows = [generated_row(family, draw) for _ in range(NUM_CONVERSATIONS)]
    conversations = [to_conversation(Row(Path("rows.jsonl"), 1, row), RowKeys()) for row in rows]
    num_apart = 0
    for row, samples in zip(rows, encoder.encode(conversations), strict=True):
        assert isinstance(samples, list), samples
        asked = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        asked = asked[-1:] if train_on == "last" else asked
        expected = [served(row, i, family, tokenizer) for i in asked if is_trained(row["messages"][i])]
        found = [stretch for sample in samples for stretch in shown(sample, tokenizer)]
        assert found == expected
        num_apart += len(samples) > 1
    assert encoder.num_unlike_prompt == 0
    if family.together and turns != "apart":
        assert encoder.num_apart == num_apart == 0
    elif train_on == "all":
        assert num_apart > 0
    stops = {tokenizer.convert_tokens_to_ids(stop) for stop in family.stops}
    assert set(encoder.end_token_ids) <= stops
