"""Rows to conversations: the usual shapes recognised, messages checked; or why it is none."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from trainer.config import RowKeys
from trainer.data.rows import Row, UnusableError

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
FLAGS = frozenset(("weight", "train", "trainable", "loss_mask"))
"""Keys of a message that decide whether an assistant turn is supervised: 0 and false leave it
out of the loss.
"""
SHAREGPT_KEY, ALPACA_KEYS, SYSTEM_KEY = (
    "conversations",
    ("instruction", "input", "output", "history"),
    "system",
)
TRL_KEYS = PROMPT, COMPLETION = "prompt", "completion"
TOKEN_KEYS = IDS_KEY, MASK_KEY, LABELS_KEY, DIGEST_KEY = (
    "input_ids",
    "loss_mask",
    "labels",
    "vocabulary_digest",
)
PROMPT_NAMES = ("prompt", "question", "query", "instruction", "problem", "input", "user", "source")
RESPONSE_NAMES = (
    "completion",
    "response",
    "answer",
    "output",
    "solution",
    "assistant",
    "target",
    "chosen",
)
TEXT_NAMES = ("text", "content")
CHAT_NAMES = ("messages", "conversation", "conversations", "dialog", "dialogue", "chat")
NUM_NAMED = 30  # columns listed in a message
Message = dict[str, Any]


def columns_of(keys: RowKeys) -> tuple[str, ...]:
    """All that is ever read of a row."""
    if keys.text_key is not None:
        return (keys.text_key,)
    if keys.prompt_key is not None and keys.response_key is not None:
        return (keys.prompt_key, keys.response_key, keys.tools_key)
    known = (SHAREGPT_KEY, *ALPACA_KEYS, SYSTEM_KEY, *TRL_KEYS, *TOKEN_KEYS)
    return tuple(dict.fromkeys((keys.messages_key, keys.tools_key, *known)))


class Shape(NamedTuple):
    """What a row was taken for."""

    words: str
    columns: frozenset[str]
    """That are read of it then, nested ones by the name of the outer one too."""


@cache
def shape_of(words: str, *columns: str) -> Shape:
    return Shape(words, frozenset(columns) | {name.partition(".")[0] for name in columns})


@dataclass(frozen=True)
class Conversation:
    """Checked messages as a chat template takes them: `content` is always text, `tools` a list
    of objects or None.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    untrained: frozenset[int] = frozenset()
    """Indices of the assistant messages that are left out of the loss."""


def to_conversation(row: Row, keys: RowKeys) -> tuple[Shape, Conversation]:
    """What a row was taken for, and the conversation in it: prompt and response columns, chat
    messages, ShareGPT, Alpaca, or TRL's two lists. Raises `UnusableError`.
    """
    shape, given, num_given = _messages(row, keys)
    messages = [_checked_message(message, index) for index, message in enumerate(given)]
    trained = [
        _take_flags(message, index) and index >= num_given for index, message in enumerate(messages)
    ]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableError(
            f"no assistant turn: {len(messages)} messages, none with role 'assistant'"
        )
    tools = _tools(_lookup(row.record, keys.tools_key), keys.tools_key)
    return shape, Conversation(
        messages, tools, frozenset([index for index in turns if not trained[index]])
    )


def has_conversation(record: dict[str, Any], keys: RowKeys) -> bool:
    """Whether a row has columns that are read as messages before any others."""
    is_named = keys.prompt_key is not None or _lookup(record, keys.messages_key) is not None
    return (
        is_named
        or record.get(SHAREGPT_KEY) is not None
        or ("instruction" in record and "output" in record)
    )


def _messages(row: Row, keys: RowKeys) -> tuple[Shape, list[Any], int]:
    """What the row was taken for, its messages, and how many of these are only given."""
    record = row.record
    if keys.prompt_key is not None and keys.response_key is not None:
        shape = shape_of(
            f"prompts in '{keys.prompt_key}' and responses in '{keys.response_key}'",
            *columns_of(keys),
        )
        return shape, _from_prompt_response(row, keys.prompt_key, keys.response_key), 0
    for key in (keys.messages_key, SHAREGPT_KEY):
        if (turns := _lookup(record, key)) is not None:
            messages, others = _from_turns(record, key, turns)
            return shape_of(f"messages in '{key}'", key, keys.tools_key, *others), messages, 0
    if "instruction" in record and "output" in record:
        shape = shape_of(
            "Alpaca's 'instruction' and 'output'", *ALPACA_KEYS, SYSTEM_KEY, keys.tools_key
        )
        return shape, _from_alpaca(record), 0
    prompt, completion = record.get(PROMPT), record.get(COMPLETION)
    if isinstance(prompt, list) and isinstance(completion, list):
        shape = shape_of(f"messages in '{PROMPT}' and '{COMPLETION}'", *TRL_KEYS, keys.tools_key)
        return shape, [*prompt, *completion], len(prompt)
    if keys.messages_key in record:
        raise UnusableError(f"messages not a list: '{keys.messages_key}' is null")
    tried = f"'{keys.messages_key}' (data.messages_key), 'conversations' (ShareGPT), 'instruction' + 'output' (Alpaca)"
    raise UnusableError(
        f"unrecognised columns: found {_found(row)}; tried {tried}; {_proposal(row)}"
    )


def _from_prompt_response(row: Row, prompt_key: str, response_key: str) -> list[Any]:
    prompt, response = (
        column(row, prompt_key, "prompt_key"),
        column(row, response_key, "response_key"),
    )
    if not isinstance(prompt, list):
        require_text(prompt, f"'{prompt_key}'")
        prompt = [{"role": "user", "content": prompt}]
    require_text(response, f"'{response_key}'")
    return [*prompt, {"role": "assistant", "content": response}]


def column(row: Row, key: str, name: str) -> Any:
    """What stands in the column that `data.<name>` names. Raises `UnusableError` where there is
    none.
    """
    value = _lookup(row.record, key)
    if value is None and key not in _column_names(row):
        raise UnusableError(
            f"unrecognised columns: found {_found(row)}; tried '{key}' (data.{name})"
        )
    return value


def _column_names(row: Row) -> list[str]:
    """Columns of a row, those inside objects as `a.b`."""

    def names(record: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in record.items():
            if isinstance(value, dict) and value:
                yield from names(value, f"{prefix}{name}.")
            else:
                yield prefix + name

    return [*names(row.record), *row.unread]


def _found(row: Row) -> str:
    names = _column_names(row)
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return (", ".join(map(repr, names[:NUM_NAMED])) or "no columns") + more


def _proposal(row: Row) -> str:
    """The override for columns that look like messages, like a prompt and its response, or like
    a text.
    """
    columns = _column_names(row)
    by_name = {name.rpartition(".")[2].lower(): name for name in reversed(columns)}

    def first(names: tuple[str, ...]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    chats = (name for name in columns if _is_chat(_lookup(row.record, name)))
    if chat := next(chats, None) or first(CHAT_NAMES):
        return f"a column of messages is read with data.messages_key={chat}"
    prompt, response, text = first(PROMPT_NAMES), first(RESPONSE_NAMES), first(TEXT_NAMES)
    if prompt is not None and response is not None:
        return f"single-turn columns are read with data.prompt_key={prompt} data.response_key={response}"
    if text is not None and isinstance(_lookup(row.record, text), str | None):
        return f"a column of plain text is read with data.text_key={text}"
    return "for single-turn columns set data.prompt_key and data.response_key"


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    speakers = (str(turn.get("role", turn.get("from"))) for turn in turns if isinstance(turn, dict))
    return any(SHAREGPT_ROLES.get(speaker) == "assistant" for speaker in speakers)


def _from_turns(record: dict[str, Any], key: str, turns: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The messages, and what columns besides they are made of."""
    if isinstance(turns, str):
        with suppress(ValueError):
            turns = json.loads(turns)
    if not isinstance(turns, list):
        raise UnusableError(f"messages not a list: '{key}' is {_type(turns)}")
    if not turns:
        raise UnusableError(f"no messages: '{key}' is an empty list")
    if not (isinstance(turns[0], dict) and "from" in turns[0] and "role" not in turns[0]):
        return turns, ()
    system = record.get(SYSTEM_KEY)
    head = [{"role": "system", "content": system}] if system else []
    return head + [_from_sharegpt(turn, index) for index, turn in enumerate(turns)], (SYSTEM_KEY,)


def _from_sharegpt(turn: Any, index: int) -> Message:
    if not isinstance(turn, dict):
        raise UnusableError(f"message not an object: message {index + 1} is {_type(turn)}")
    speaker, value = turn.get("from"), turn.get("value")
    others = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        kind = "missing role" if speaker is None else "unknown role"
        raise UnusableError(
            f"{kind}: message {index + 1} is from {speaker!r}, known are "
            f"{', '.join(SHAREGPT_ROLES)}"
        )
    if speaker != "function_call":
        return {**others, "role": SHAREGPT_ROLES[speaker], "content": value}
    text = require_text(value, f"function_call in message {index + 1}")
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise UnusableError(
            f"broken tool_calls: function_call in message {index + 1} is not JSON: {error}"
        ) from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) for call in calls):
        raise UnusableError(
            f"broken tool_calls: function_call in message {index + 1} must be an object"
        )
    return {
        **others,
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _from_alpaca(record: dict[str, Any]) -> list[Any]:
    messages: list[Any] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    for turn in record.get("history") or []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2):
            raise UnusableError(
                f"wrong content type: 'history' must hold pairs of user and assistant text, got "
                f"{_type(turn)}"
            )
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    prompt = record["instruction"]
    require_text(prompt, "'instruction'")
    if record.get("input"):
        require_text(record["input"], "'input'")
        prompt = f"{prompt}\n{record['input']}" if prompt else record["input"]
    return [
        *messages,
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": record["output"]},
    ]


def _checked_message(message: Any, index: int) -> Message:
    where = f"message {index + 1}"
    if not isinstance(message, dict):
        raise UnusableError(f"message not an object: {where} is {_type(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise UnusableError(
            f"missing role: {where} has only {', '.join(map(repr, message)) or 'no columns'}"
        )
    if role not in ROLES:
        raise UnusableError(
            f"unknown role: {where} has role {role!r}, known are {', '.join(ROLES)}"
        )
    calls = message.get("tool_calls") or []
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UnusableError(f"broken tool_calls: 'tool_calls' of {where} must be a list of objects")
    content = message.get("content")
    if content is None and role == "assistant" and calls:
        content = ""
    if content is None and message.get("function_call"):
        raise UnusableError(
            f"broken tool_calls: {where} has 'function_call', an older form: write it as "
            f"'tool_calls'"
        )
    if not isinstance(content, str):
        content = _content_text(content, f"content of {where} ({role})")
    if role == "assistant" and not content.strip() and not calls:
        raise UnusableError(f"empty assistant turn: {where} has neither text nor tool_calls")
    if role == "user" and not content.strip():
        raise UnusableError(f"empty prompt: {where} (user) has no text")
    message["content"] = content
    return message


def _take_flags(message: Message, index: int) -> bool:
    """Whether a message may be trained; the flags that say so are taken out of it, so that no
    template sees them.
    """
    if FLAGS.isdisjoint(message):
        return True
    flags = {name: message.pop(name) for name in sorted(FLAGS & message.keys(), reverse=True)}
    where = f"message {index + 1} ({message['role']})"
    for name, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UnusableError(
                f"bad flag: '{name}' of {where} is {value!r}, known are 0, 1, false and true"
            )
    given = " and ".join(f"{name}={value}" for name, value in flags.items())
    if any(flags.values()) != all(flags.values()):
        raise UnusableError(f"bad flag: {where} has {given}, which contradict each other")
    if all(flags.values()) and message["role"] != "assistant":
        raise UnusableError(
            f"bad flag: {where} has {given}, but only assistant turns are trained; remove it"
        )
    return all(flags.values())


def _content_text(content: Any, what: str) -> str:
    """Text, or the text parts of a list joined as they are."""
    if not isinstance(content, list):
        return require_text(content, what)
    for part in content:
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            kind = repr(part.get("type")) if isinstance(part, dict) else _type(part)
            raise UnusableError(
                f"wrong content type: {what} has a part of type {kind}, only text can be trained on"
            )
    return "".join(part["text"] for part in content)


def _tools(tools: Any, key: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UnusableError(f"broken tools: '{key}' is text but not JSON: {error}") from None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnusableError(
            f"broken tools: '{key}' must be a list of objects or that list as JSON, got "
            f"{_type(tools)}"
        )
    return tools


def _lookup(record: dict[str, Any], key: str) -> Any:
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def require_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UnusableError(f"wrong content type: {what} is {_type(value)}, not text")
    return value


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__
