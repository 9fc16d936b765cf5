"""Where the assistant speaks in a rendered conversation, as spans of characters."""

import json
import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import Message
from trainer.data.rows import UnusableError
from trainer.data.template import ChatTemplate, Tools
from trainer.data.tokens import MarkedText, Span

FIX = "use a template with generation tags (data.chat_template)"


class SpanFinder:
    """Finds the assistant's characters in renderings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        self._added = _Texts({token.content for token in added})
        self._special = _Texts({token.content for token in added if token.special})

    def find(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> MarkedText:
        """The rendered text and its assistant spans, ascending and disjoint, each up to and with its end token.

        One for each assistant message, unless a template's generation tags see it otherwise.
        """
        text, tagged = template.render(messages, tools, tagged=template.has_generation_tags)
        if template.has_generation_tags:
            spans = list(self._tagged_spans(text, tagged))
        else:
            spans = list(self._prefix_spans(text, template, messages, tools))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnusableError(f"bad unicode: half of a surrogate pair, {text[error.start]!r}") from None
        return MarkedText(text, spans)

    def _tagged_spans(self, text: str, tagged: list[Span]) -> Iterator[Span]:
        """Generation tags, with the end token taken in where it stands right behind the tag."""
        touching: list[Span] = []
        for start, end in tagged:
            if touching and start == touching[-1][1]:
                touching[-1] = (touching[-1][0], end)
            elif end > start:
                touching.append((start, end))
        if not touching:
            raise UnusableError("chat template: its generation tags mark nothing in this conversation")
        for number, (start, end) in enumerate(touching, start=1):
            inside = text[start:end].rstrip()
            is_open = self._special.last_in(inside) is None
            if is_open and (behind := self._added.first_in(text, end)) is not None:
                yield start, end + len(behind)
            elif self._added.last_in(inside) is not None:
                yield start, start + len(inside)
            else:
                raise _never_ends(number)

    def _prefix_spans(self, text: str, template: ChatTemplate, messages: list[Message], tools: Tools) -> Iterator[Span]:
        """What each assistant message adds to the rendering of those before it, verified against the whole `text`."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._turn_start(text, template, messages[:index], tools) for index in turns]
        limits = [*starts[1:], len(text)]
        for number, (index, start, limit) in enumerate(zip(turns, starts, limits, strict=True), start=1):
            if index + 1 == len(messages):
                head = text
            else:
                head, _ = template.render(messages[: index + 1], tools)
            end = self._turn_end(text, head, (start, limit), messages[index], number)
            if not start < end <= limit:
                raise UnusableError(f"chat template: assistant turn {number} cannot be masked; {FIX}")
            if "add_generation_prompt" not in template.source:
                self._check_no_header(text, start, messages[index], number)
            yield start, end

    def _turn_start(self, text: str, template: ChatTemplate, before: list[Message], tools: Tools) -> int:
        prompt, _ = template.render(before, tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The generation prompt may hold more than the turn's header, such as an empty thinking block: take the longest
        # part, cut in front of a token, that the conversation really has.
        base, _ = template.render(before, tools)
        if text.startswith(base) and prompt.startswith(base):
            header = prompt[len(base) :]
            for cut in reversed(self._added.positions(header)):
                if cut > 0 and text.startswith(header[:cut], len(base)):
                    return len(base) + cut
        reason = "its rendering changes with the messages that follow"
        raise UnusableError(f"chat template: message {len(before) + 1} cannot be masked, {reason}; {FIX}")

    def _turn_end(self, text: str, head: str, bounds: Span, message: Message, number: int) -> int:
        """`head` is the rendering up to this turn: a prefix of `text`, unless the template rewrites earlier turns."""
        start, limit = bounds
        closed = head.rstrip()
        token = self._added.last_in(closed)
        if token is None:
            raise _never_ends(number)
        if text.startswith(head):
            return len(closed)
        if token in json.dumps(message, ensure_ascii=False, default=str):
            raise UnusableError(f"chat template: assistant turn {number} contains '{token}' and is rewritten; {FIX}")
        position = text.find(token, start, limit)
        return position + len(token) if position >= 0 else -1

    def _check_no_header(self, text: str, start: int, message: Message, number: int) -> None:
        """A template that cannot render a generation prompt leaves the turn's header inside the span."""
        lead = text[start : max(start, text.find(message["content"].strip(), start))]
        if self._special.positions(lead):
            reason = f"{lead!r} before it would be trained, because the template ignores add_generation_prompt"
            raise UnusableError(f"chat template: assistant turn {number} cannot be masked: {reason}; {FIX}")


class _Texts:
    """Texts of added tokens, looked up at the end, at a position and anywhere in a rendering."""

    def __init__(self, texts: set[str]) -> None:
        self._texts = {text for text in texts if text.strip()}  # some vocabularies add runs of spaces
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._anywhere = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def last_in(self, text: str) -> str | None:
        return next((text[-n:] for n in self._lengths if text[-n:] in self._texts), None)

    def first_in(self, text: str, position: int) -> str | None:
        candidates = (text[position : position + n] for n in self._lengths)
        return next((candidate for candidate in candidates if candidate in self._texts), None)

    def positions(self, text: str) -> list[int]:
        return [match.start() for match in self._anywhere.finditer(text)]


def _never_ends(number: int) -> UnusableError:
    return UnusableError(
        f"chat template: assistant turn {number} does not end with a special token, so the model would never learn to "
        f"stop; use a template that closes the turn (data.chat_template)"
    )
