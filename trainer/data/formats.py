"""Row formats: recognises the format of a row, checks it, and turns it into an item to encode."""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.rows import NUM_COLUMNS, Row, Summary, UnusableError
from trainer.data.tokens import Encoded

Message = dict[str, Any]
Record = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
FLAGS = ("weight", "train", "trainable", "loss_mask")
"""Keys of an assistant message that exclude its turn from the loss if their value is 0 or false."""
SHAREGPT = "conversations"
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
ALPACA = ("instruction", "input", "output", "history", "system")
TRL = ("prompt", "completion")
TOKENS = ("input_ids", "loss_mask", "labels", "vocabulary_digest")
UNSUPERVISED = -100
CHAT_NAMES = r"messages|conversations?|dialog|dialogue|chat"
PROMPT_NAMES = r"prompt|question|query|instruction|problem"
RESPONSE_NAMES = r"completion|response|answer|output|solution|target|chosen"
TEXT_NAMES = r"text|content"


@dataclass(frozen=True)
class Conversation:
    """Checked messages for a chat template. The `content` of each is text."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    untrained: frozenset[int]
    """Indices of the assistant messages that are excluded from the loss."""


@dataclass(frozen=True)
class Continuation:
    """Plain text. `text` and the end token are supervised; `prompt`, possibly empty, is not."""

    prompt: str
    text: str


Item = Conversation | Continuation | Encoded
Recognised = tuple[str, Iterable[str], Item]
"""(name of the format, columns that it reads, item)."""


def columns_of(keys: RowKeys) -> tuple[str, ...]:
    """Return the names of all columns that a row's format may read."""
    if keys.text_key is not None:
        return (keys.text_key,)
    if keys.prompt_key is not None and keys.response_key is not None:
        return (keys.prompt_key, keys.response_key, keys.tools_key)
    return tuple(
        dict.fromkeys((keys.messages_key, keys.tools_key, SHAREGPT, *ALPACA, *TRL, *TOKENS))
    )


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hexadecimal digits that are equal for vocabularies with the same tokens and ids."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


class RowParser:
    """Turns rows into items. The format of a row follows from `keys` and its column names."""

    def __init__(
        self,
        keys: RowKeys,
        tokenizer: PreTrainedTokenizerBase,
        seen: Summary,
    ) -> None:
        """`seen` counts formats and unread columns."""
        self._keys = keys
        self._tokenizer = tokenizer
        self._seen = seen

    def parse(self, row: Row) -> Item:
        """Return the item of a row. Raises `UnusableError`, and `RecursionError` for a deeply
        nested row.
        """
        if row.problem is not None:
            raise row.problem
        name, columns, item = self._recognised(row)
        self._seen.rows_by_shape[name] += 1
        read = {outer for column in columns for outer in (column, column.partition(".")[0])}
        # a column may be empty here because only other rows use it
        unread = [
            column
            for column, value in row.record.items()
            if column not in read and value not in (None, "", [], {})
        ]
        self._seen.unread_columns.update([*unread, *row.unread])
        return item

    def question(self, row: Row, *, is_text: Callable[[], bool]) -> Item:
        """Return the item of a row that may have no answer: `prompt` alone is a question.

        `is_text`: True if such a prompt is plain text, False if it is a user message. Raises
        `UnusableError`.
        """
        try:
            return self.parse(row)
        except UnusableError:
            if row.problem is not None:
                raise
            key = self._keys.messages_key
            turns = _lookup(row.record, key)
            prompt = row.record.get("prompt")
            if turns is not None:
                messages, _ = _from_turns(row.record, key, turns)
            elif not isinstance(prompt, str):
                raise
            elif self._keys.text_key is not None or not self._tokenizer.chat_template or is_text():
                return Continuation(prompt, "")
            else:
                messages = [_message("user", prompt)]
            return self._conversation(row.record, messages)

    def _recognised(self, row: Row) -> Recognised:
        """Try the formats in the order that docs/data.md lists. Raises `UnusableError`."""
        record = row.record
        keys = self._keys
        if keys.text_key is not None:
            text = _text(_column(row, keys.text_key, "text_key"), f"'{keys.text_key}'")
            return f"plain text in '{keys.text_key}'", [keys.text_key], Continuation("", text)
        if keys.prompt_key is not None and keys.response_key is not None:
            prompt = _column(row, keys.prompt_key, "prompt_key")
            response = _column(row, keys.response_key, "response_key")
            name = f"prompts in '{keys.prompt_key}' and responses in '{keys.response_key}'"
            messages = _from_pair(prompt, response, keys.prompt_key, keys.response_key)
            return name, columns_of(keys), self._conversation(record, messages)
        for key in (keys.messages_key, SHAREGPT):
            if (turns := _lookup(record, key)) is not None:
                messages, others = _from_turns(record, key, turns)
                columns = [key, keys.tools_key, *others]
                return f"messages in '{key}'", columns, self._conversation(record, messages)
        if "instruction" in record and "output" in record:
            conversation = self._conversation(record, _from_alpaca(record))
            return "Alpaca's 'instruction' and 'output'", (*ALPACA, keys.tools_key), conversation
        if "input_ids" in record:
            return "tokens in 'input_ids'", TOKENS, self._tokens(record)
        prompt = record.get("prompt")
        completion = record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            name = (
                "plain text in 'prompt' and 'completion' (to train them as chats, set "
                "data.prompt_key=prompt data.response_key=completion)"
            )
            return name, TRL, Continuation(prompt, completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            conversation = self._conversation(record, prompt + completion, num_given=len(prompt))
            name = "messages in 'prompt' and 'completion'"
            return name, (*TRL, keys.tools_key), conversation
        if keys.messages_key in record:
            raise UnusableError(f"messages not a list: '{keys.messages_key}' is null")
        raise UnusableError(
            f"unrecognised columns: found {_found(row)}; tried '{keys.messages_key}' "
            f"(data.messages_key), 'conversations' (ShareGPT), 'instruction' + 'output' (Alpaca); "
            f"{_proposal(row)}"
        )

    def _conversation(
        self,
        record: Record,
        given: list[Any],
        num_given: int = 0,
    ) -> Conversation:
        """Check messages, and exclude the first `num_given` from the loss. Raises
        `UnusableError`.
        """
        messages = [_checked_message(message, index) for index, message in enumerate(given)]
        trained = [_is_trained(message, index) for index, message in enumerate(messages)]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        untrained = frozenset(i for i in turns if i < num_given or not trained[i])
        tools = _tools(_lookup(record, self._keys.tools_key), self._keys.tools_key)
        return Conversation(messages, tools, untrained)

    def _tokens(self, record: Record) -> Encoded:
        """Check ids and a mask that another program made. Raises `UnusableError`."""
        digest, num_ids = self._vocabulary
        if record.get("vocabulary_digest") is None:
            raise UnusableError(
                f"unknown vocabulary: the row has no column vocabulary_digest; if this model's "
                f"tokenizer made its ids, add the column with the value '{digest}'"
            )
        if record["vocabulary_digest"] != digest:
            raise UnusableError(
                f"different vocabulary: a different tokenizer made the ids (its vocabulary_digest is "
                f"{record['vocabulary_digest']!r}, this model's is {digest!r}); tokenize the texts "
                f"again with this model's tokenizer"
            )
        ids = _integers(record, "input_ids")
        if not len(ids):
            raise UnusableError("bad tokens: 'input_ids' is an empty list")
        masks = []
        if record.get("loss_mask") is not None:
            values = _integers(record, "loss_mask", len(ids))
            _require("loss_mask", values, (values == 0) | (values == 1), "0 and 1")
            masks.append(values == 1)
        if record.get("labels") is not None:
            values = _integers(record, "labels", len(ids))
            known = "-100 and the id at the same position (not the next token's id)"
            _require("labels", values, (values == UNSUPERVISED) | (values == ids), known)
            masks.append(values != UNSUPERVISED)
        if not masks:
            raise UnusableError("bad tokens: 'input_ids' requires a 'loss_mask' or 'labels' column")
        if not np.array_equal(masks[0], masks[-1]):
            raise UnusableError("bad tokens: 'loss_mask' and 'labels' mark different tokens")
        known = f"0 to {num_ids - 1} in this tokenizer"
        _require("input_ids", ids, (ids >= 0) & (ids < num_ids), known)
        return Encoded(ids, masks[0])

    @cached_property
    def _vocabulary(self) -> tuple[str, int]:
        """Digest and number of ids of the tokenizer's vocabulary."""
        return vocabulary_digest(self._tokenizer), max(self._tokenizer.get_vocab().values()) + 1


# Columns


def _lookup(record: Record, key: str) -> Any:
    """Return the value of a column; None if it is missing. `a.b` may name a nested column."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _column(row: Row, key: str, name: str) -> Any:
    """Return the value of the column `key`, which `data.<name>` names. Raises `UnusableError` if it
    is missing or null.
    """
    value = _lookup(row.record, key)
    if value is None:
        raise UnusableError(
            f"unrecognised columns: found {_found(row)}; tried '{key}' (data.{name}), which is "
            f"missing or null"
        )
    return value


def _column_names(record: Record, prefix: str = "") -> Iterator[str]:
    """Yield the column names; a nested column is named `a.b`."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from _column_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _columns(row: Row) -> list[str]:
    return [*_column_names(row.record), *row.unread]


def _found(row: Row) -> str:
    return ", ".join(map(repr, _columns(row)[:NUM_COLUMNS])) or "no columns"


def _proposal(row: Row) -> str:
    """Return a hint that names the override for a column with a common name."""

    def first(names: str) -> str | None:
        pattern = re.compile(rf"(.*\.)?({names})", re.IGNORECASE)
        return next(filter(pattern.fullmatch, _columns(row)), None)

    prompt = first(PROMPT_NAMES)
    response = first(RESPONSE_NAMES)
    if chat := first(CHAT_NAMES):
        return f"to read '{chat}' as messages, set data.messages_key={chat}"
    if prompt and response:
        return f"to read these columns, set data.prompt_key={prompt} data.response_key={response}"
    if text := first(TEXT_NAMES):
        return f"to read '{text}' as plain text, set data.text_key={text}"
    return "for single-turn columns set data.prompt_key and data.response_key"


# Formats of conversations


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _from_pair(
    prompt: Any,
    response: Any,
    prompt_key: str,
    response_key: str,
) -> list[Any]:
    if not isinstance(prompt, list):
        prompt = [_message("user", _text(prompt, f"'{prompt_key}'"))]
    return [*prompt, _message("assistant", _text(response, f"'{response_key}'"))]


def _from_turns(record: Record, key: str, turns: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the messages, converted from ShareGPT's format if necessary, and the names of other
    columns that hold messages. Raises `UnusableError`.
    """
    turns = _json(turns)
    if not isinstance(turns, list):
        raise UnusableError(f"messages not a list: '{key}' is {_type(turns)}")
    if not turns:
        raise UnusableError(f"no messages: '{key}' is an empty list")
    if not (isinstance(turns[0], dict) and "from" in turns[0] and "role" not in turns[0]):
        return turns, ()
    messages = [_from_sharegpt(turn, f"message {i}") for i, turn in enumerate(turns, start=1)]
    return _system(record) + messages, ("system",)


def _system(record: Record) -> list[Message]:
    text = record.get("system")
    return [] if text in (None, "") else [_message("system", text)]


def _from_sharegpt(turn: Any, where: str) -> Message:
    """Return a ShareGPT turn as a message. Raises `UnusableError`; `where` names the turn."""
    if not isinstance(turn, dict):
        raise UnusableError(f"message not an object: {where} is {_type(turn)}")
    message = dict(turn)
    speaker = message.pop("from", None)
    value = message.pop("value", None)
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise UnusableError(f"unknown role: {where} is from {speaker!r}; known roles: {known}")
    message["role"] = SHAREGPT_ROLES[speaker]
    if speaker != "function_call":
        return {**message, "content": value}
    calls = _json(_text(value, f"function_call in {where}"))
    calls = calls if isinstance(calls, list) else [calls]
    if not _are_objects(calls):
        raise UnusableError(f"broken tool_calls: function_call in {where} must be a JSON object")
    return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _from_alpaca(record: Record) -> list[Any]:
    """Return the messages of an Alpaca record: system, history, instruction with input, output.

    Raises `UnusableError`.
    """
    messages = _system(record)
    for turn in record.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2):
            raise UnusableError(
                f"wrong content type: 'history' must be a list of pairs of user and assistant text, "
                f"got {_type(turn)}"
            )
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    prompt = _text(record["instruction"], "'instruction'")
    if record.get("input") not in (None, ""):
        prompt = "\n".join(filter(None, [prompt, _text(record["input"], "'input'")]))
    return messages + _from_pair(prompt, record["output"], "instruction", "output")


# Messages


def _checked_message(message: Any, index: int) -> Message:
    """Return a copy without nulls, in which `content` is text. Raises `UnusableError`."""
    where = f"message {index + 1}"
    if not isinstance(message, dict):
        raise UnusableError(f"message not an object: {where} is {_type(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise UnusableError(
            f"unknown role: {where} has role {role!r}; known roles: {', '.join(ROLES)}"
        )
    calls = message.get("tool_calls") or []
    if not _are_objects(calls):
        raise UnusableError(f"broken tool_calls: 'tool_calls' of {where} must be a list of objects")
    for call in calls:
        function = call.get("function", call)
        text = function.get("arguments") if isinstance(function, dict) else None
        if text and isinstance(text, str) and _json(text) is text:
            raise UnusableError(
                f"broken tool_calls: the arguments of a call in {where} are not JSON: {text[:60]!r}"
            )
    content = message.get("content")
    if content is None and role == "assistant" and calls:
        content = ""
    content = _content_text(content, f"content of {where} ({role})")
    if not content.strip():
        if role == "assistant" and not calls:
            raise UnusableError(f"empty assistant turn: {where} has neither text nor tool_calls")
        if role == "user":
            raise UnusableError(f"empty prompt: {where} (user) has no text")
    return {**message, "content": content}


def _is_trained(message: Message, index: int) -> bool:
    """Remove the training flags from a message to hide them from templates. Return False if they
    exclude it from the loss. Raises `UnusableError`.
    """
    flags = {name: message.pop(name) for name in FLAGS if name in message}
    given = " and ".join(f"{name}={value!r}" for name, value in flags.items())
    where = f"bad flag: message {index + 1} ({message['role']}) has {given}"
    if any(value not in (0, 1) for value in flags.values()):
        raise UnusableError(f"{where}; allowed: 0, 1, false and true")
    if len(set(flags.values())) > 1:
        raise UnusableError(f"{where}, which contradict each other")
    is_on = all(flags.values())
    if flags and is_on and message["role"] != "assistant":
        raise UnusableError(f"{where}, but only assistant turns are trained; remove it")
    return is_on


def _content_text(content: Any, what: str) -> str:
    """Return a text unchanged, or join the text parts of a list. Raises `UnusableError`."""
    if not isinstance(content, list):
        return _text(content, what)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else _type(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UnusableError(
                f"wrong content type: {what} has a part of type {kind!r}; only text can be trained"
            )
    return "".join(part["text"] for part in content)


def _tools(tools: Any, key: str) -> list[dict[str, Any]] | None:
    """Return tool definitions, given as a list or as JSON text. Raises `UnusableError`."""
    tools = _json(tools)
    if not tools:
        return None
    if not _are_objects(tools):
        raise UnusableError(
            f"broken tools: '{key}' must be a list of objects, or JSON text of one, got "
            f"{_type(tools)}"
        )
    return list(tools)


# Values


def _json(value: Any) -> Any:
    """Parse JSON text; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UnusableError(f"wrong content type: {what} is {_type(value)}, not text")
    return value


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _integers(record: Record, key: str, length: int | None = None) -> np.ndarray:
    """Return a list of integers or booleans as int32. Raises `UnusableError`."""
    values = record[key]
    try:
        found = array("i", values if isinstance(values, list) else [None])
    except (TypeError, OverflowError) as error:
        reason = f"bad tokens: '{key}' is not a list of 32-bit integers"
        raise UnusableError(reason) from error
    if length not in (None, len(found)):
        raise UnusableError(
            f"bad tokens: '{key}' has {len(found)} values, but 'input_ids' has {length}"
        )
    return np.array(found)


def _require(
    key: str,
    values: np.ndarray,
    is_known: np.ndarray,
    known: str,
) -> None:
    if not is_known.all():
        place = int(is_known.argmin())
        raise UnusableError(
            f"bad tokens: '{key}' has {values[place]} at position {place + 1}; allowed: {known}"
        )
