"""Conversations to tokens and loss masks: renderings by the chat template, batched calls of the
tokenizer.

What is supervised is decided on characters, as assistant spans that end with the end-of-turn token,
and carried over to the tokens that start inside.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.content import REASONING_KEYS, StructuralTokens, num_left_out
from trainer.data.conversation import Conversation, Message
from trainer.data.plain_text import Continuation, TextEncoder
from trainer.data.rows import TOO_DEEP, Seen, UnusableError
from trainer.data.shapes import Item
from trainer.data.spans import Renderings
from trainer.data.template import ChatTemplate, Tools
from trainer.data.tokens import Encoded, Located, MarkedText, Span, TokenFinder
from trainer.data.turns import AUTO, TurnDivider
from trainer.errors import DataError

# one tokenizer call: enough for all cores; a token takes more than 100 bytes meanwhile
BATCH_CHARS = 300_000
BATCH_ROWS = 2000  # however short, and bad ones too
READ_KEYS = frozenset(("role", "content", "tool_calls", *REASONING_KEYS))


_Batch = list[list[MarkedText] | Encoded | UnusableError]


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template, and plain text; takes over what
    is encoded.

    Raises `DataError` for a tokenizer without offsets (a slow one), and where it has to render
    without a chat template or with a broken one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: dict[str, Any],
        special_in_content: str = "error",
        turns: str = AUTO,
        train_on: str = "all",
        seen: Seen | None = None,
    ) -> None:
        """`special_in_content`: a token of the template's turns inside a text is an `error`, plain
        `text`, or a token like any other (`parse`). `turns`: as `TurnDivider` takes it. `train_on`:
        `all` assistant turns, or the `last` one, are supervised, as far as their flags allow.
        `seen`: what is added to.
        """
        if not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise DataError(
                f"{name} is a slow tokenizer without character offsets: use a model with a "
                f"tokenizer.json"
            )
        self.tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self._special_in_content, self._train_on = special_in_content, train_on
        self._templates: dict[str, tuple[ChatTemplate, StructuralTokens]] = {}
        self.seen = Seen() if seen is None else seen
        self._turns = TurnDivider(tokenizer, turns, self.seen.counts)
        self._finders = {frozenset[str](): TokenFinder(tokenizer)}
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._special_ids = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def encode(self, items: Iterable[Item]) -> Iterator[list[Encoded] | UnusableError]:
        """In order: the samples of each item, or why it has none. A bounded number of items is
        read ahead.
        """
        for batch in self._rendered_batches(items):
            yield from self._masked_batch(batch, self._located(batch))

    def _located(self, batch: _Batch) -> dict[frozenset[str], Iterator[Located]]:
        """Of the batch's renderings, by the tokens that stand in them as aliases."""
        texts: dict[frozenset[str], list[MarkedText]] = {}
        for samples in batch:
            for item in samples if isinstance(samples, list) else ():
                texts.setdefault(item.aliased, []).append(item)
        return {
            aliased: iter(self._finder(aliased).find(items)) for aliased, items in texts.items()
        }

    def _finder(self, aliased: frozenset[str]) -> TokenFinder:
        if aliased not in self._finders:
            self._finders[aliased] = TokenFinder(self.tokenizer, aliased)
        return self._finders[aliased]

    def _rendered_batches(self, items: Iterable[Item]) -> Iterator[_Batch]:
        """Renderings in batches of about `BATCH_CHARS`, with the reason in place of what cannot
        be rendered.
        """
        batch: _Batch = []
        num_chars = 0
        for item in items:
            try:
                if isinstance(item, UnusableError | Encoded):
                    batch.append(item)
                else:
                    batch.append(samples := self._marked(item))
                    num_chars += sum(len(sample.text) for sample in samples)
            except UnusableError as error:
                batch.append(error)
            except RecursionError:
                batch.append(UnusableError(TOO_DEEP))
            if num_chars >= BATCH_CHARS or len(batch) == BATCH_ROWS:
                yield batch
                batch, num_chars = [], 0
        if batch:
            yield batch

    def _marked(self, item: Conversation | Continuation) -> list[MarkedText]:
        return (
            self._rendered(item) if isinstance(item, Conversation) else [self._texts.marked(item)]
        )

    @cached_property
    def _texts(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, special_in_content=self._special_in_content)

    def _rendered(self, conversation: Conversation) -> list[MarkedText]:
        tools = conversation.tools
        template, structural = self._template(tools)
        messages = [template.with_arguments(message) for message in conversation.messages]
        is_hidden = (
            self._special_in_content == "text"
            and structural.first_in([messages, tools]) is not None
        )
        if is_hidden:
            messages, tools = structural.hide(messages), structural.hide(tools)
        elif self._special_in_content == "error":
            structural.check_none(messages, tools)
        renderings = Renderings(template, messages, tools)
        asked = renderings.turns[-1:] if self._train_on == "last" else renderings.turns
        parts = self._turns.divide(
            renderings, [index for index in asked if index not in conversation.untrained]
        )
        for part in parts:
            num_lost = num_left_out(template, part.messages, tools, part.marked, part.turns)
            self.seen.counts["num_without_reasoning"] += num_lost
        self._count_unread(messages, template)
        return [structural.exchange(part.marked) if is_hidden else part.marked for part in parts]

    def _template(self, tools: Tools) -> tuple[ChatTemplate, StructuralTokens]:
        if not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template: name a jinja file in data.chat_template"
            )
        source = self.tokenizer.get_chat_template(tools=tools)
        if source not in self._templates:
            template = ChatTemplate(source, self.tokenizer, self._template_kwargs)
            self._templates[source] = template, StructuralTokens(template.structural_tokens)
        return self._templates[source]

    def _count_unread(self, messages: list[Message], template: ChatTemplate) -> None:
        for message in messages:
            if not READ_KEYS.issuperset(message):
                self.seen.unread_keys.update(message.keys() - READ_KEYS - template.words)

    def _masked_batch(
        self, batch: _Batch, located: dict[frozenset[str], Iterator[Located]]
    ) -> Iterator[list[Encoded] | UnusableError]:
        for samples in batch:
            if isinstance(samples, UnusableError):
                yield samples
                continue
            if isinstance(samples, Encoded):
                yield [self._taken_over(samples)]
                continue
            found = [next(located[item.aliased]) for item in samples]
            try:
                yield [
                    self._masked(item, *tokens) for item, tokens in zip(samples, found, strict=True)
                ]
            except UnusableError as error:
                yield error

    def _taken_over(self, sample: Encoded) -> Encoded:
        is_last = sample.loss_mask & ~np.append(sample.loss_mask[1:], False)
        self.seen.end_token_ids |= self._special_ids.intersection(
            sample.input_ids[is_last].tolist()
        )
        return sample

    def _masked(self, item: MarkedText, input_ids: np.ndarray, bounds: list[Span]) -> Encoded:
        if item.prompt is not None:
            self.seen.end_token_ids.add(self._texts.end_id)
            return self._texts.encoded(item, input_ids, bounds, self._finder(item.aliased))
        loss_mask = np.zeros(len(input_ids), dtype=bool)
        for first, last in bounds:
            end_id = int(input_ids[last - 1]) if first < last else None
            if end_id is None or end_id not in self._added_ids:
                raise UnusableError(
                    "chat template: the end-of-turn text is not a single token; add it to the "
                    "tokenizer as special"
                )
            loss_mask[first:last] = True
            self.seen.end_token_ids.add(end_id)
        return Encoded(input_ids, loss_mask)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over everything that turns a conversation into ids: vocabulary, merges, special
    tokens, chat template.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("truncation", None)  # left behind by whoever called the tokenizer last
    backend.pop("padding", None)
    parts = [
        backend,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.split_special_tokens,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
