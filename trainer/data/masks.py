"""Divides a conversation into samples, and marks the characters that the assistant generates.

The span of a turn in a rendering is found in one of two ways:

1. If the template has `{% generation %}` tags, transformers reports the spans inside them.
2. Otherwise the messages before the turn are rendered with the generation prompt. The turn begins
   where this text ends. It ends with the end token of the rendering that includes the turn.

Some templates render a turn differently once other messages follow, for example without its
reasoning. The full rendering then does not show the turn as a model writes it on a server.
Therefore `Renderings.divide` compares the full rendering (`_together`) with the renderings that a
server would make (`_served`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.data.formats import Message
from trainer.data.rows import Summary, UnusableError
from trainer.data.template import ChatTemplate, Tools, with_function
from trainer.data.tokens import MarkedText, Span

MARK = "zq0qz"
"""An unlikely text. It is put into a message, to find the end of the message in a rendering."""
FIX = "use a template with generation tags (data.chat_template)"
NEVER_ENDS = (
    "chat template: an assistant turn does not end with a special token, so the model would not "
    "learn to stop; use a template that ends turns with one (data.chat_template)"
)


@dataclass(frozen=True, kw_only=True)
class Part(MarkedText):
    """One sample of a conversation: its text, its messages, and the supervised turns among them."""

    messages: list[Message]
    turns: list[int]


class Renderings:
    """Renders one conversation with one template: in full, and for each turn the messages up to it,
    with and without the turn itself.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: Tools,
    ) -> None:
        self._template = template
        self._messages = messages
        self._tools = tools
        self.turns = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        self._rendered = cache(self._render)

    def divide(
        self,
        trained: list[int],
        mode: str,
        seen: Summary,
    ) -> list[Part]:
        """Return the samples that supervise the turns `trained`. `mode` is the value of
        `data.turns`.

        `together` makes one sample of the whole conversation, `apart` one sample of each turn.
        `auto` divides the conversation only if a turn looks different in the full rendering than on
        a server. Raises `UnusableError`.
        """
        seen.num_conversations += 1
        if not trained:
            return [Part(self._whole, [], messages=self._messages, turns=[])]
        if mode == "together":
            return [self._together(trained)]
        together = None
        problem = None
        if mode == "auto":
            self._whole  # noqa: B018  raises if the whole conversation cannot be rendered
            try:
                together = self._together(trained)
            except UnusableError as error:
                problem = error
        served = [self._served(index) for index in trained]
        parts = [part for part in served if part is not None]
        num_missing = len(served) - len(parts)
        if together is not None and (num_missing or _shows(together, parts)):
            seen.num_unlike_prompt += num_missing
            return [together]
        if num_missing:
            number = trained[served.index(None)] + 1
            raise problem or UnusableError(
                f"chat template: message {number} (assistant) does not begin with the header of "
                f"the generation prompt; change data.apply_chat_template_kwargs or "
                f"data.chat_template, "
                f"or set data.turns=together"
            )
        seen.num_apart += 1
        return parts

    # Renderings

    def _render(self, num_messages: int, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Render the first `num_messages` messages. With `prompt`, add the generation prompt, as a
        server does. Return the text, and the spans inside generation tags.
        """
        messages = self._messages[:num_messages]
        text, tagged = self._template.render(messages, self._tools, prompt=prompt)
        if num_messages - 1 in self.turns and not prompt:
            text += self._template.end_after(messages[-1])
        return text, tagged

    def _upto(self, num_messages: int, *, prompt: bool = False) -> str:
        text, _ = self._rendered(num_messages, prompt=prompt)
        return text

    @property
    def _whole(self) -> str:
        return self._upto(len(self._messages))

    def _closed(self, index: int) -> str:
        """Return the rendering of the messages up to and including a turn, cut after the turn's end
        token. Raises `UnusableError`.
        """
        closed = self._upto(index + 1).removesuffix(self._template.closing).rstrip()
        if self._template.added.last_in(closed) is None:
            raise UnusableError(NEVER_ENDS)
        return closed

    # Turns of the whole rendering

    def _together(self, trained: list[int]) -> Part:
        """Return the whole conversation as one sample. The span of each turn includes its end
        token.
        """
        text, tagged = self._rendered(len(self._messages))
        has_tags = self._template.has_generation_tags
        spans = list(self._tagged_spans(text, tagged) if has_tags else self._prefix_spans())
        if trained != self.turns:
            if len(spans) != len(self.turns):
                raise UnusableError(
                    f"chat template: its generation tags mark {len(spans)} spans in "
                    f"{len(self.turns)} assistant turns, so this row's training flags cannot be "
                    f"applied; {FIX}"
                )
            spans = [
                span for index, span in zip(self.turns, spans, strict=True) if index in trained
            ]
        return Part(text, spans, messages=self._messages, turns=trained)

    def _tagged_spans(self, text: str, tagged: list[Span]) -> Iterator[Span]:
        """Yield the spans inside generation tags. A span includes the end token that directly
        follows it. Raises `UnusableError`.
        """
        touching: list[Span] = []
        for start, end in tagged:
            if touching and start == touching[-1][1]:
                touching[-1] = (touching[-1][0], end)
            elif end > start:
                touching.append((start, end))
        if not touching:
            raise UnusableError(
                "chat template: its generation tags mark nothing in this conversation"
            )
        added = self._template.added
        special = self._template.special
        for start, end in touching:
            inside = text[start:end].rstrip()
            following = None if special.last_in(inside) else added.first_in(text, end)
            if following is not None:
                yield start, end + len(following)
            elif added.last_in(inside) is not None:
                yield start, start + len(inside)
            else:
                raise UnusableError(NEVER_ENDS)

    def _prefix_spans(self) -> Iterator[Span]:
        """Yield the span that each turn adds to the rendering of the messages before it."""
        text = self._whole
        starts = [self._turn_start(index) for index in self.turns]
        limits = [*starts[1:], len(text)]
        for index, start, limit in zip(self.turns, starts, limits, strict=True):
            end = self._turn_end(index, start, limit)
            if not start < end <= limit:
                raise UnusableError(f"chat template: message {index + 1} cannot be masked; {FIX}")
            self._check_no_header(text, start, index)
            yield start, end

    def _turn_start(self, index: int) -> int:
        """Return the position at which the text of a turn begins in the full rendering, after its
        header.

        Raises `UnusableError` if the rendering of earlier messages depends on later ones.
        """
        text = self._whole
        prompt = self._upto(index, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The generation prompt may contain more than the turn's header, such as an empty thinking
        # block. The header is its longest beginning, cut before a token, that the text contains.
        base = self._upto(index)
        if text.startswith(base) and prompt.startswith(base):
            header = prompt[len(base) :]
            for cut in reversed(self._template.added.positions(header)):
                if cut > 0 and text.startswith(header[:cut], len(base)):
                    return len(base) + cut
        raise UnusableError(
            f"chat template: message {index + 1} cannot be masked, because its rendering depends on "
            f"the messages that follow; {FIX}"
        )

    def _turn_end(
        self,
        index: int,
        start: int,
        limit: int,
    ) -> int:
        """Return the position at which a turn ends in the full rendering; -1 if it is not found."""
        text = self._whole
        closed = self._closed(index)
        if text.startswith(closed):
            return len(closed)
        # the template rewrites the turn if messages follow, but still ends it with the same token
        token = self._template.added.last_in(closed) or ""
        if token in json.dumps(self._messages[index], ensure_ascii=False, default=str):
            raise UnusableError(
                f"chat template: message {index + 1} contains '{token}', and the template rewrites it; {FIX}"
            )
        position = text.find(token, start, limit)
        return position + len(token) if position >= 0 else -1

    def _check_no_header(
        self,
        text: str,
        start: int,
        index: int,
    ) -> None:
        """Raise `UnusableError` if the span begins with the turn's header, because the template
        ignores `add_generation_prompt`.
        """
        if "add_generation_prompt" in self._template.source:
            return
        content = (self._messages[index]["content"] or "").strip()
        lead = text[start : max(start, text.find(content, start))]
        if self._template.special.positions(lead):
            raise UnusableError(
                f"chat template: message {index + 1} cannot be masked, because the template ignores "
                f"add_generation_prompt: the loss would include {lead!r}; {FIX}"
            )

    # Turns as a model generates them on a server

    def _served(self, index: int) -> Part | None:
        """Return a sample that consists of the prompt, as a server renders it, and the turn. Return None if
        the rendered turn does not begin with the header at the end of the prompt.
        """
        prompt = self._upto(index, prompt=True)
        head = self._upto(index + 1)
        start = len(prompt) if head.startswith(prompt) else self._header_end(index)
        if start is None:
            return None
        if self._template.has_generation_tags:
            _, tagged = self._rendered(index + 1)
            own = [(max(first, start), end) for first, end in tagged if end > start]
            spans = list(self._tagged_spans(head, own))
        else:
            spans = [(start, len(self._closed(index)))]
            self._check_no_header(head, start, index)
        shift = len(prompt) - start
        return Part(
            prompt + head[start:],
            [(first + shift, end + shift) for first, end in spans],
            messages=self._messages[: index + 1],
            turns=[index],
        )

    def _header_end(self, index: int) -> int | None:
        """Return where the turn's header ends, if the rendering writes earlier messages differently
        than the prompt does; None if it is not found. The search begins at a mark in the message
        before the turn.
        """
        base = self._upto(index)
        prompt = self._upto(index, prompt=True)
        header = prompt[len(base) :] if prompt.startswith(base) else ""
        if not index or not header:
            return None
        last = self._messages[index - 1]
        text = last["content"] or ""
        content = text.rstrip()
        changed = {**last, "content": content + MARK + text[len(content) :]}
        messages = [*self._messages[: index - 1], changed, self._messages[index]]
        marked, _ = self._template.render(messages, self._tools)
        before, _, after = marked.partition(MARK)
        at = after.find(header)
        if at < 0 or not self._upto(index + 1).startswith(before + after):
            return None
        return len(before) + at + len(header)


def _shows(together: Part, parts: list[Part]) -> bool:
    """Return True if the full conversation contains each turn, and the text before it, as its part
    does.
    """
    return together.spans == [span for part in parts for span in part.spans] and all(
        together.text[:end] == part.text[:end] for part in parts for _, end in part.spans
    )


# Parts of a message that the template leaves out

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK_END = "</think>"
TEXT = "text"
CALLS = "tool_calls"
REASONING = "reasoning"
Marks = dict[str, tuple[int, str]]
"""{mark: (index of the message, part of the message) that contains it}."""


def count_missing_reasoning(template: ChatTemplate, part: Part, tools: Tools) -> int:
    """Return the number of supervised turns in a sample that are rendered without their reasoning.

    If the text of the turns does not contain the reasoning verbatim, each part gets a mark, and a
    second rendering is searched for the marks. Raises `UnusableError` for a turn that is rendered
    without its text or tool calls.
    """
    messages = part.messages
    turns = part.turns
    spans = part.spans
    if len(spans) != len(turns):
        spans = [(0, len(part.text))] * len(turns)
    if all(
        _is_plainly_there(messages[index], part.text, span)
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
    except UnusableError:  # the template cannot render the marks, so nothing is known
        return 0
    missing = {place for mark, place in marks.items() if mark not in text}
    for index in turns:
        if found := [kind for kind in (TEXT, CALLS) if (index, kind) in missing]:
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
    """Return the message with a mark in each of its parts, and add the marks to `marks`."""

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
    if message["content"]:
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
    """Return the tool call with a mark in its arguments, or in its name if it has none."""

    def change(value: object) -> object:
        if not isinstance(value, dict):
            return f"{value}{mark}"
        texts = {key: item + mark for key, item in value.items() if isinstance(item, str)}
        return {**value, **texts, mark: mark}

    changed = with_function(call, "arguments", change)
    return with_function(call, "name", change) if changed is call else changed
