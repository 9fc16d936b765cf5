"""Conversations to tokens and loss masks: one rendering by the chat template, batched calls of the tokenizer.

A conversation is always rendered as a whole. What is supervised is decided on characters, as assistant spans that end
with the end-of-turn token, and carried over to the tokens that start inside.
"""

import hashlib
import itertools
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.conversation import Conversation, Message
from trainer.data.rows import BadRow
from trainer.data.tokens import Located, MarkedText, Span, TokenFinder
from trainer.protocols import DataError

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
BATCH_CHARS = 300_000  # one tokenizer call: enough for all cores; a token takes more than 100 bytes meanwhile
BATCH_ROWS = 2000  # however short, and bad ones too
NUM_BATCHES_AHEAD = 2  # the tokenizer finds the next one waiting while its results are taken over
FIX = "use a template with generation tags (data.chat_template)"
Tools = list[dict[Any, Any]] | None


@dataclass(frozen=True)
class Encoded:
    """Tokens of one conversation (int32) and which of them are supervised (bool, same length)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


_Batch = list[MarkedText | BadRow | str]


class _UnusableError(Exception):
    """Why a conversation cannot be encoded, as `kind: detail`."""


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template.

    Raises `DataError` for a tokenizer without a chat template, with a broken one, or without offsets (a slow one).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, template_kwargs: dict[str, Any]) -> None:
        if not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise DataError(f"{name} is a slow tokenizer without character offsets: use a model with a tokenizer.json")
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template: name a jinja file in data.chat_template")
        self._spans = _SpanFinder(tokenizer, template_kwargs)
        self._tokens = TokenFinder(tokenizer)
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._end_token_ids: set[int] = set()

    @property
    def end_token_ids(self) -> list[int]:
        """Ids seen closing an assistant turn so far: what generation must stop at."""
        return sorted(self._end_token_ids)

    def encode(self, conversations: Iterable[Conversation | BadRow]) -> Iterator[Encoded | BadRow | str]:
        """In order: tokens and mask of each conversation, or the reason why it has none; bad rows pass as they are.

        It reads a bounded number of conversations ahead: the tokenizer leaves Python free to render the next ones.
        """
        running: deque[tuple[_Batch, Callable[[], list[Located]]]] = deque()
        with ThreadPoolExecutor(max_workers=NUM_BATCHES_AHEAD) as pool:
            for batch in self._rendered_batches(conversations):
                texts = [item for item in batch if isinstance(item, MarkedText)]
                running.append((batch, self._tokens.start(texts, pool)))
                if len(running) > NUM_BATCHES_AHEAD:
                    yield from self._masked_batch(*running.popleft())
            while running:
                yield from self._masked_batch(*running.popleft())

    def _rendered_batches(self, conversations: Iterable[Conversation | BadRow]) -> Iterator[_Batch]:
        """Renderings in batches of about `BATCH_CHARS`, with the reason in place of what cannot be rendered."""
        batch: _Batch = []
        num_chars, limit = 0, BATCH_CHARS // 8  # the first batches are smaller: the tokenizer starts sooner
        for conversation in conversations:
            try:
                item = conversation if isinstance(conversation, BadRow) else self._spans.find(conversation)
                num_chars += 0 if isinstance(item, BadRow) else len(item.text)
                batch.append(item)
            except _UnusableError as error:
                batch.append(str(error))
            if num_chars >= limit or len(batch) == BATCH_ROWS:
                yield batch
                batch, num_chars, limit = [], 0, min(2 * limit, BATCH_CHARS)
        if batch:
            yield batch

    def _masked_batch(self, batch: _Batch, tokens: Callable[[], list[Located]]) -> Iterator[Encoded | BadRow | str]:
        located = iter(tokens())
        for item in batch:
            yield self._masked(*next(located)) if isinstance(item, MarkedText) else item

    def _masked(self, input_ids: np.ndarray, bounds: list[Span]) -> Encoded | str:
        loss_mask = np.zeros(len(input_ids), dtype=bool)
        for first, last in bounds:
            end_id = int(input_ids[last - 1]) if first < last else None
            if end_id is None or end_id not in self._added_ids:
                return "chat template: the end-of-turn text is not a single token; add it to the tokenizer as special"
            loss_mask[first:last] = True
            self._end_token_ids.add(end_id)
        return Encoded(input_ids, loss_mask)


class _SpanFinder:
    """Renders conversations and finds the assistant's characters in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = {**tokenizer.special_tokens_map, **template_kwargs}
        added = tokenizer.added_tokens_decoder.values()
        self._added = _Texts({token.content for token in added})
        self._special = _Texts({token.content for token in added if token.special})

    def find(self, conversation: Conversation) -> MarkedText:
        """The rendered text and its assistant spans, ascending and disjoint, each up to and with its end token."""
        messages = [_with_object_arguments(message) for message in conversation.messages]
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        if _has_generation_tags(template):
            text, tagged = self._render(template, messages, conversation.tools, tagged=True)
            spans = list(self._tagged_spans(text, tagged))
        else:
            text, _ = self._render(template, messages, conversation.tools)
            spans = list(self._prefix_spans(text, template, messages, conversation.tools))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _UnusableError(f"bad unicode: half of a surrogate pair, {text[error.start]!r}") from None
        return MarkedText(text, spans)

    def _render(
        self, template: str, messages: list[Message], tools: Tools, *, prompt: bool = False, tagged: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns two lists
                conversations=[messages],
                tools=tools,  # type: ignore[arg-type]  # list is invariant
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tagged,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is broken in line {error.lineno}: {error}; see data.chat_template"
            ) from error
        except Exception as error:  # templates run arbitrary expressions on the row
            raise _UnusableError(f"chat template: refuses the conversation: {type(error).__name__}: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if tagged else []

    def _tagged_spans(self, text: str, tagged: list[Span]) -> Iterator[Span]:
        """Generation tags, with the end token taken in where it stands right behind the tag."""
        touching: list[Span] = []
        for start, end in tagged:
            if touching and start == touching[-1][1]:
                touching[-1] = (touching[-1][0], end)
            elif end > start:
                touching.append((start, end))
        if not touching:
            raise _UnusableError("chat template: its generation tags mark nothing in this conversation")
        for number, (start, end) in enumerate(touching, start=1):
            inside = text[start:end].rstrip()
            is_open = self._special.last_in(inside) is None
            if is_open and (behind := self._added.first_in(text, end)) is not None:
                yield start, end + len(behind)
            elif self._added.last_in(inside) is not None:
                yield start, start + len(inside)
            else:
                raise _never_ends(number)

    def _prefix_spans(self, text: str, template: str, messages: list[Message], tools: Tools) -> Iterator[Span]:
        """What each assistant message adds to the rendering of those before it, verified against the whole `text`."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._turn_start(text, template, messages[:index], tools) for index in turns]
        limits = [*starts[1:], len(text)]
        for number, (index, start, limit) in enumerate(zip(turns, starts, limits, strict=True), start=1):
            if index + 1 == len(messages):
                head = text
            else:
                head, _ = self._render(template, messages[: index + 1], tools)
            end = self._turn_end(text, head, (start, limit), messages[index], number)
            if not start < end <= limit:
                raise _UnusableError(f"chat template: assistant turn {number} cannot be masked; {FIX}")
            if "add_generation_prompt" not in template:
                self._check_no_header(text, start, messages[index], number)
            yield start, end

    def _turn_start(self, text: str, template: str, before: list[Message], tools: Tools) -> int:
        prompt, _ = self._render(template, before, tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The generation prompt may hold more than the turn's header, such as an empty thinking block: take the longest
        # part, cut in front of a token, that the conversation really has.
        base, _ = self._render(template, before, tools)
        if text.startswith(base) and prompt.startswith(base):
            header = prompt[len(base) :]
            for cut in reversed(self._added.positions(header)):
                if cut > 0 and text.startswith(header[:cut], len(base)):
                    return len(base) + cut
        reason = "its rendering changes with the messages that follow"
        raise _UnusableError(f"chat template: message {len(before) + 1} cannot be masked, {reason}; {FIX}")

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
            raise _UnusableError(f"chat template: assistant turn {number} contains '{token}' and is rewritten; {FIX}")
        position = text.find(token, start, limit)
        return position + len(token) if position >= 0 else -1

    def _check_no_header(self, text: str, start: int, message: Message, number: int) -> None:
        """A template that cannot render a generation prompt leaves the turn's header inside the span."""
        lead = text[start : max(start, text.find(message["content"].strip(), start))]
        if self._special.positions(lead):
            reason = f"{lead!r} before it would be trained, because the template ignores add_generation_prompt"
            raise _UnusableError(f"chat template: assistant turn {number} cannot be masked: {reason}; {FIX}")


@cache
def _has_generation_tags(template: str) -> bool:
    return GENERATION_TAG.search(template) is not None


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


def _never_ends(number: int) -> _UnusableError:
    return _UnusableError(
        f"chat template: assistant turn {number} does not end with a special token, so the model would never learn to "
        f"stop; use a template that closes the turn (data.chat_template)"
    )


def _with_object_arguments(message: Message) -> Message:
    """Tool arguments as objects: servers hand templates objects, and a template would quote JSON text a second time."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object_argument(call) for call in message["tool_calls"]]}


def _with_object_argument(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over everything that turns a conversation into ids: vocabulary, merges, special tokens, chat template."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("truncation", None)  # left behind by whoever called the tokenizer last
    backend.pop("padding", None)
    parts = [backend, tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.split_special_tokens]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def preview(
    input_ids: np.ndarray, loss_mask: np.ndarray, tokenizer: PreTrainedTokenizerBase, *, color: bool | None = None
) -> str:
    """The decoded sample, its supervised parts in green or in [[…]]; `color` None means green on a terminal."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if (sys.stdout.isatty() if color is None else color) else ("[[", "]]")
    bounds = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1).tolist(), len(input_ids)]
    parts = []
    for start, end in itertools.pairwise(bounds):
        text = tokenizer.decode(input_ids[start:end].tolist(), clean_up_tokenization_spaces=False)
        parts.append(f"{opening}{text}{closing}" if start < end and loss_mask[start] else str(text))
    return "".join(parts)
