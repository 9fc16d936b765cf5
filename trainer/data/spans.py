"""Where the assistant speaks in renderings of a conversation, as spans of characters."""

import json
from collections.abc import Iterator
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import Message
from trainer.data.rows import UnusableError
from trainer.data.template import ChatTemplate, Tools
from trainer.data.tokens import MarkedText, Span, any_of

MARK = "zq0qz"
FIX = "use a template with generation tags (data.chat_template)"


class Renderings:
    """One conversation by one template: as a whole, and as it stood before and after each turn;
    each is made once.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self.turns = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        self._made: dict[tuple[int, bool], str] = {}

    @cached_property
    def whole(self) -> tuple[str, list[Span]]:
        """The text, and what the template's generation tags enclose."""
        text, tagged = self.template.render(self.messages, self.tools)
        return text + self._open_end(len(self.messages)), tagged

    @property
    def text(self) -> str:
        return self.whole[0]

    def before(self, index: int, *, prompt: bool) -> str:
        """The messages before this one; with `prompt` what a server hands a model that is to
        write it.
        """
        if index == len(self.messages) and not prompt:
            return self.text
        if (index, prompt) not in self._made:
            try:
                text, _ = self.template.render(self.messages[:index], self.tools, prompt=prompt)
            except UnusableError as error:
                if index:
                    raise
                raise UnusableError(
                    "no prompt: message 1 is the assistant's, and the chat template renders none "
                    "without a message before it; begin the conversation with a user's message, or "
                    "leave out its first one"
                ) from error
            self._made[index, prompt] = text if prompt else text + self._open_end(index)
        return self._made[index, prompt]

    def _open_end(self, index: int) -> str:
        """What the template has not written yet behind an assistant's message that is the last
        of so many.
        """
        is_turn = index > 0 and self.messages[index - 1]["role"] == "assistant"
        return self.template.end_behind(self.messages[index - 1]) if is_turn else ""

    def number(self, index: int) -> int:
        """Of an assistant message, counted among these from 1."""
        return self.turns.index(index) + 1


class SpanFinder:
    """Finds the assistant's characters in renderings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        self._added = _Texts({token.content for token in added})
        self._special = _Texts({token.content for token in added if token.special})

    def together(self, renderings: Renderings) -> MarkedText:
        """The whole rendering and its assistant spans, ascending and disjoint, each up to and with
        its end token.

        One for each assistant message, unless a template's generation tags see it otherwise.
        """
        text, tagged = renderings.whole
        if renderings.template.has_generation_tags:
            return MarkedText(text, list(self._tagged_spans(text, tagged)))
        return MarkedText(text, list(self._prefix_spans(renderings)))

    def served(self, renderings: Renderings, index: int) -> MarkedText | None:
        """A turn as generation makes it: the prompt that a server renders, and what the turn adds
        behind the messages before it alone. None where the turn is not rendered as the prompt's end
        begins.
        """
        template, prompt = renderings.template, renderings.before(index, prompt=True)
        head = renderings.before(index + 1, prompt=False)
        start = len(prompt) if head.startswith(prompt) else self._header_end(renderings, index)
        if start is None:
            return None
        if template.has_generation_tags:
            _, tagged = template.render(renderings.messages[: index + 1], renderings.tools)
            own = [(max(first, start), end) for first, end in tagged if end > start]
            spans = list(self._tagged_spans(head, own))
        else:
            spans = [(start, len(self._closed(renderings, index)))]
            if "add_generation_prompt" not in template.source:
                self._check_no_header(head, start, renderings, index)
        shift = len(prompt) - start
        return MarkedText(
            prompt + head[start:], [(first + shift, end + shift) for first, end in spans]
        )

    def _header_end(self, renderings: Renderings, index: int) -> int | None:
        """Where the header that the generation prompt writes ends in the rendering up to a turn,
        which writes messages before the turn otherwise than the prompt does. A mark in the last of
        these tells where it is to be looked for.
        """
        base, prompt = renderings.before(index, prompt=False), renderings.before(index, prompt=True)
        header = prompt[len(base) :] if prompt.startswith(base) else ""
        if not index or not header:
            return None
        head, last = renderings.before(index + 1, prompt=False), renderings.messages[index - 1]
        content = last["content"].rstrip()
        changed = {**last, "content": content + MARK + last["content"][len(content) :]}
        messages = [*renderings.messages[: index - 1], changed, renderings.messages[index]]
        marked, _ = renderings.template.render(messages, renderings.tools)
        before, _, behind = marked.partition(MARK)
        at = behind.find(header)
        return (
            len(before) + at + len(header) if at >= 0 and head.startswith(before + behind) else None
        )

    def is_as_served(self, renderings: Renderings, index: int, span: Span) -> bool:
        """Whether the whole rendering up to the end of a turn's span is what `served` would
        make of it.
        """
        text, (start, end) = renderings.text, span
        prompt = renderings.before(index, prompt=True)
        is_generated = start == len(prompt) or (
            renderings.template.has_generation_tags and start > len(prompt)
        )
        return (
            is_generated
            and text.startswith(prompt)
            and text[:end] == self._closed(renderings, index)
        )

    def _closed(self, renderings: Renderings, index: int) -> str:
        """The rendering that ends with a turn, without what follows the turn's end token."""
        head = renderings.before(index + 1, prompt=False)
        closed = head.removesuffix(renderings.template.closing).rstrip()
        if self._added.last_in(closed) is None:
            raise _never_ends(renderings.number(index))
        return closed

    def _tagged_spans(self, text: str, tagged: list[Span]) -> Iterator[Span]:
        """Generation tags, with the end token taken in where it stands right behind the tag."""
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
        for number, (start, end) in enumerate(touching, start=1):
            inside = text[start:end].rstrip()
            is_open = self._special.last_in(inside) is None
            if is_open and (behind := self._added.first_in(text, end)) is not None:
                yield start, end + len(behind)
            elif self._added.last_in(inside) is not None:
                yield start, start + len(inside)
            else:
                raise _never_ends(number)

    def _prefix_spans(self, renderings: Renderings) -> Iterator[Span]:
        """What each assistant message adds to the rendering of those before it, verified
        against the whole.
        """
        starts = [self._turn_start(renderings, index) for index in renderings.turns]
        limits = [*starts[1:], len(renderings.text)]
        for index, start, limit in zip(renderings.turns, starts, limits, strict=True):
            end = self._turn_end(renderings, index, (start, limit))
            if not start < end <= limit:
                raise UnusableError(
                    f"chat template: assistant turn {renderings.number(index)} cannot be masked; "
                    f"{FIX}"
                )
            if "add_generation_prompt" not in renderings.template.source:
                self._check_no_header(renderings.text, start, renderings, index)
            yield start, end

    def _turn_start(self, renderings: Renderings, index: int) -> int:
        text, prompt = renderings.text, renderings.before(index, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The generation prompt may hold more than the turn's header, such as an empty thinking
        # block: take the longest part, cut in front of a token, that the conversation really has.
        base = renderings.before(index, prompt=False)
        if text.startswith(base) and prompt.startswith(base):
            header = prompt[len(base) :]
            for cut in reversed(self._added.positions(header)):
                if cut > 0 and text.startswith(header[:cut], len(base)):
                    return len(base) + cut
        reason = "its rendering changes with the messages that follow"
        raise UnusableError(f"chat template: message {index + 1} cannot be masked, {reason}; {FIX}")

    def _turn_end(self, renderings: Renderings, index: int, bounds: Span) -> int:
        """Where the rendering up to this turn ends: a prefix of the whole, unless the template
        rewrites the turn.
        """
        text, closed = renderings.text, self._closed(renderings, index)
        if text.startswith(closed):
            return len(closed)
        token = self._added.last_in(closed) or ""
        if token in json.dumps(renderings.messages[index], ensure_ascii=False, default=str):
            number = renderings.number(index)
            raise UnusableError(
                f"chat template: assistant turn {number} contains '{token}' and is rewritten; {FIX}"
            )
        position = text.find(token, *bounds)
        return position + len(token) if position >= 0 else -1

    def _check_no_header(self, text: str, start: int, renderings: Renderings, index: int) -> None:
        """A template that cannot render a generation prompt leaves the turn's header inside the
        span.
        """
        content = (renderings.messages[index]["content"] or "").strip()
        lead = text[start : max(start, text.find(content, start))]
        if self._special.positions(lead):
            reason = f"{lead!r} before it would be trained, because the template ignores add_generation_prompt"
            number = renderings.number(index)
            raise UnusableError(
                f"chat template: assistant turn {number} cannot be masked: {reason}; {FIX}"
            )


class _Texts:
    """Texts of added tokens, looked up at the end, at a position and anywhere in a rendering."""

    def __init__(self, texts: set[str]) -> None:
        own = {text for text in texts if text.strip()}  # some vocabularies add runs of spaces
        self._longest_first = tuple(sorted(own, key=len, reverse=True))
        self._anywhere = any_of(own)

    def last_in(self, text: str) -> str | None:
        if not text.endswith(self._longest_first):
            return None
        return next(candidate for candidate in self._longest_first if text.endswith(candidate))

    def first_in(self, text: str, position: int) -> str | None:
        if not text.startswith(self._longest_first, position):
            return None
        return next(
            candidate for candidate in self._longest_first if text.startswith(candidate, position)
        )

    def positions(self, text: str) -> list[int]:
        return [match.start() for match in self._anywhere.finditer(text)]


def _never_ends(number: int) -> UnusableError:
    return UnusableError(
        f"chat template: assistant turn {number} does not end with a special token, so the model "
        f"would never learn to stop; use a template that closes the turn (data.chat_template)"
    )
