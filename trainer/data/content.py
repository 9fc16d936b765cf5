"""What a message says against what its rendering says: role tokens forged in texts, and parts
that are left out.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from trainer.data.conversation import Message
from trainer.data.rows import UnusableError
from trainer.data.template import ChatTemplate, Tools, with_function
from trainer.data.tokens import MarkedText, Span, aliases, any_of

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK_END = "</think>"
TEXT, CALLS, REASONING = "text", "tool_calls", "reasoning"
PARTS = frozenset((CALLS, *REASONING_KEYS))


class StructuralTokens:
    """Tokens that a template writes around turns, looked up in the texts of conversations."""

    def __init__(self, tokens: frozenset[str]) -> None:
        self._tokens = tokens
        self._aliases = aliases(tokens)
        self._exchange = self._aliases | {alias: token for token, alias in self._aliases.items()}
        self._any_token = any_of(self._aliases)
        self._any_alias = any_of(self._aliases.values())
        self._either = any_of(self._exchange)

    def check_none(self, messages: list[Message], tools: Tools) -> None:
        """Raises `UnusableError` naming message and token."""
        if any(map(self._is_in, messages)) or _search(self._any_token, tools):
            places = (
                (f"message {i} ({message['role']})", message)
                for i, message in enumerate(messages, start=1)
            )
            where, token = next(
                (where, token)
                for where, value in (*places, ("a tool definition", tools))
                if (token := self.first_in(value))
            )
            raise UnusableError(
                f"special token in content: {where} contains {token!r}, which the chat template "
                f"writes around turns; remove it, or set data.special_in_content=text to train it "
                f"as ordinary characters"
            )

    def _is_in(self, message: Message) -> bool:
        """Of a message of role and content alone only the content can hold one."""
        return (
            _search(self._any_token, message["content"] if len(message) == 2 else message)
            is not None
        )

    def first_in(self, value: Any) -> str | None:
        """The first of the tokens in any text of a nested value."""
        found = _search(self._any_token, value)
        return found[0] if found else None

    def hide(self, value: Any) -> Any:
        """The value with an alias, of the same length, in place of each of the tokens."""
        if _search(self._any_alias, value):
            raise UnusableError(
                "special token in content: it stands beside characters that are kept to stand for "
                "it"
            )
        return _mapped(
            value, lambda text: self._any_token.sub(lambda match: self._aliases[match[0]], text)
        )

    def exchange(self, marked: MarkedText) -> MarkedText:
        """The rendering of hidden content with tokens and aliases in each other's place: what was
        hidden is ordinary text again, what the template wrote is an alias.
        """
        text = self._either.sub(lambda match: self._exchange[match[0]], marked.text)
        return MarkedText(text, marked.spans, self._tokens)


def num_left_out(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    marked: MarkedText,
    turns: list[int],
) -> int:
    """How many of the supervised `turns` lack their reasoning in the rendering of the messages.

    Raises `UnusableError` for a turn that lacks its text or its tool calls. What does not stand
    there word for word is looked for in a second rendering, in which every part carries a mark of
    its own.
    """
    spans = (
        marked.spans if len(marked.spans) == len(turns) else [(0, len(marked.text))] * len(turns)
    )
    if all(
        _is_plainly_there(messages[index], marked.text, span)
        for index, span in zip(turns, spans, strict=True)
    ):
        return 0
    marks = (f"zq{number}qz" for number in itertools.count(1))
    marked_turns = {index: _with_marks(messages[index], marks) for index in turns}
    changed = [
        marked_turns[i][0] if i in marked_turns else message for i, message in enumerate(messages)
    ]
    try:
        text = template.render(changed, tools)[0].lower()
    except UnusableError:  # it insists on something about the values: nothing can be said
        return 0
    num_without_reasoning = 0
    for index in turns:
        missing = {part for part, mark in marked_turns[index][1] if mark not in text}
        if found := [part for part in (TEXT, CALLS) if part in missing]:
            raise UnusableError(
                f"left out by the template: message {index + 1} (assistant) is rendered without "
                f"its {' and '.join(found)}; use a template that renders them (data.chat_template)"
            )
        num_without_reasoning += REASONING in missing
    return num_without_reasoning


def _is_plainly_there(message: Message, text: str, span: Span) -> bool:
    if not PARTS.isdisjoint(message) and any(map(message.get, PARTS)):
        return False
    content = message["content"].strip()
    return THINK_END not in content and text.find(content, *span) >= 0


def _with_marks(message: Message, marks: Iterator[str]) -> tuple[Message, list[tuple[str, str]]]:
    """The message with a mark in each of its parts, and which part carries which."""
    message, parts = dict(message), []

    def new(part: str) -> str:
        parts.append((part, mark := next(marks)))
        return mark

    reasoning, end, answer = (message["content"] or "").rpartition(THINK_END)
    if reasoning.strip():
        reasoning += new(REASONING)
    if answer.strip():
        message["content"] = reasoning + end + answer + new(TEXT)
    elif end:
        message["content"] = reasoning + end + answer
    keys = [
        key for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key].strip()
    ]
    if keys:
        mark = new(REASONING)
        message |= {key: message[key] + mark for key in keys}
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_mark(call, new(CALLS)) for call in message["tool_calls"]]
    return message, parts


def _with_mark(call: dict[str, Any], mark: str) -> dict[str, Any]:
    def change(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: item + mark if isinstance(item, str) else item for key, item in value.items()
            } | {mark: mark}
        return f"{value}{mark}"

    changed = with_function(call, "arguments", change)
    return with_function(call, "name", change) if changed is call else changed


def _search(pattern: re.Pattern[str], value: Any) -> re.Match[str] | None:
    """The first match in the texts of a nested value, keys included."""
    if isinstance(value, str):
        return pattern.search(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if found := _search(pattern, item) or _search(pattern, key):
                return found
    elif isinstance(value, list | tuple):
        for item in value:
            if found := _search(pattern, item):
                return found
    return None


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
