"""Texts of messages against their rendering: forged role tokens, and parts that are left out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trainer.data.formats import Message
from trainer.data.rows import UnusableError
from trainer.data.template import ChatTemplate, Tools, with_function
from trainer.data.tokens import MarkedText, Span, aliases, any_of

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK_END = "</think>"
TEXT, CALLS, REASONING = "text", "tool_calls", "reasoning"
Marks = dict[str, tuple[int, str]]
"""Index of the message and part of it that each mark was put into."""


class StructuralTokens:
    """Tokens that a template writes around turns, looked up in the texts of conversations."""

    def __init__(self, tokens: frozenset[str]) -> None:
        self._tokens, self._aliases = tokens, aliases(tokens)
        self._exchange = self._aliases | {alias: token for token, alias in self._aliases.items()}
        self._any_token = any_of(self._aliases)
        self._any_alias = any_of(self._aliases.values())
        self._either = any_of(self._exchange)

    def check_none(self, messages: list[Message], tools: Tools) -> None:
        """Raise `UnusableError` for a message or tool that contains one of the tokens."""
        if self.first_in([messages, tools]) is None:
            return
        places = [
            (f"message {number} ({message['role']})", message)
            for number, message in enumerate(messages, start=1)
        ]
        for where, value in (*places, ("a tool definition", tools)):
            if token := self.first_in(value):
                raise UnusableError(
                    f"special token in content: {where} contains {token!r}, which the chat "
                    f"template writes around turns; remove it, or set "
                    f"data.special_in_content=text to train it as ordinary characters"
                )

    def first_in(self, value: Any) -> str | None:
        """Return the first of the tokens in any text of a nested value."""
        found = self._any_token.search("\0".join(_texts(value)))
        return found[0] if found else None

    def hide(self, value: Any) -> Any:
        """Return the value with an alias, of the same length, in place of each of the tokens."""
        if self._any_alias.search("\0".join(_texts(value))):
            raise UnusableError(
                "special token in content: it stands beside characters that are kept to stand for "
                "it"
            )
        return _mapped(
            value, lambda text: self._any_token.sub(lambda match: self._aliases[match[0]], text)
        )

    def exchange(self, marked: MarkedText) -> MarkedText:
        """Swap tokens and aliases in the rendering of hidden content: what was hidden is ordinary
        text again, what the template wrote is an alias.
        """
        text = self._either.sub(lambda match: self._exchange[match[0]], marked.text)
        return replace(marked, text=text, aliased=self._tokens)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def count_missing_reasoning(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    marked: MarkedText,
    turns: list[int],
) -> int:
    """Return how many of the supervised `turns` are rendered without their reasoning.

    Raises `UnusableError` for a turn without its text or its tool calls. What is not found word for
    word is looked for in a second rendering, in which every part carries a mark.
    """
    spans = marked.spans
    if len(spans) != len(turns):
        spans = [(0, len(marked.text))] * len(turns)
    if all(
        _is_plainly_there(messages[index], marked.text, span)
        for index, span in zip(turns, spans, strict=True)
    ):
        return 0
    marks: Marks = {}
    changed = [
        _with_marks(message, index, marks) if index in turns else message
        for index, message in enumerate(messages)
    ]
    try:
        text = template.render(changed, tools)[0].lower()
    except UnusableError:  # it insists on something about the values: nothing can be said
        return 0
    missing = {place for mark, place in marks.items() if mark not in text}
    for index in turns:
        if found := [part for part in (TEXT, CALLS) if (index, part) in missing]:
            raise UnusableError(
                f"left out by the template: message {index + 1} (assistant) is rendered without "
                f"its {' and '.join(found)}; use a template that renders them (data.chat_template)"
            )
    return len(missing)


def _is_plainly_there(message: Message, text: str, span: Span) -> bool:
    content = message["content"] or ""
    if THINK_END in content or any(map(message.get, (CALLS, *REASONING_KEYS))):
        return False
    return text.find(content.strip(), *span) >= 0


def _with_marks(message: Message, index: int, marks: Marks) -> Message:
    """Put a mark into each part of a message."""

    def mark(part: str) -> str:
        name = f"zq{len(marks)}qz"
        marks[name] = index, part
        return name

    message = dict(message)
    reasoning, end, answer = (message["content"] or "").rpartition(THINK_END)
    if reasoning.strip():
        reasoning += mark(REASONING)
    if answer.strip():
        answer += mark(TEXT)
    if end or answer.strip():
        message["content"] = reasoning + end + answer
    keys = [
        key for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key].strip()
    ]
    if keys:
        name = mark(REASONING)
        message |= {key: message[key] + name for key in keys}
    if message.get(CALLS):
        message[CALLS] = [_with_mark(call, mark(CALLS)) for call in message[CALLS]]
    return message


def _with_mark(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Mark the arguments of a tool call, or its name where it has none."""

    def change(value: object) -> object:
        if not isinstance(value, dict):
            return f"{value}{mark}"
        texts = {key: item + mark for key, item in value.items() if isinstance(item, str)}
        return {**value, **texts, mark: mark}

    changed = with_function(call, "arguments", change)
    return with_function(call, "name", change) if changed is call else changed
