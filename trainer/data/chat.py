"""Turns rows into samples.

The chat template renders conversations; plain text is not rendered. Spans of characters mark the
supervised parts, each including its end token. The tokens that start inside a span are supervised.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.formats import Continuation, Conversation, RowParser
from trainer.data.masks import REASONING_KEYS, Part, Renderings, count_missing_reasoning
from trainer.data.rows import PrepareOptions, Row, Summary, UnusableError
from trainer.data.template import ChatTemplate, TokenTexts, Tools
from trainer.data.tokens import Encoded, MarkedText, Span, TokenFinder, require_unicode
from trainer.errors import DataError

READ_KEYS = frozenset(("role", "content", "tool_calls", *REASONING_KEYS))


@dataclass(frozen=True)
class Prompt:
    """The text before a row's answer, its tokens, and the answer."""

    text: str
    ids: list[int]
    answer: str | None
    """None if the row has none."""


class RowEncoder:
    """Turns rows into samples, with a tokenizer and its chat template.

    Raises `DataError` for a slow tokenizer, and for conversations if the chat template is missing
    or broken.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> None:
        if not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise DataError(
                f"{name} is a slow tokenizer, which does not report character offsets.\n"
                f"Fix: use a model with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.options = options
        self.seen = Summary()
        """Counts of the rows' contents."""
        self._parser = RowParser(options.keys, tokenizer, self.seen)
        self._templates: dict[str, ChatTemplate] = {}
        # made before processes are forked, so that they share its memory
        self._finder = TokenFinder(tokenizer)
        self._added_tokens = tokenizer.added_tokens_decoder  # slow to read
        added = self._added_tokens.values()
        self._special = TokenTexts({token.content for token in added if token.special})

    def encode(self, row: Row) -> list[Encoded]:
        """Return the samples of a row. Raises `UnusableError`."""
        try:
            item = self._parser.parse(row)
            if isinstance(item, Encoded):
                self._note_ends(item)
                return [item]
            if isinstance(item, Continuation):
                return [self._encoded_text(item)]
            return [self._masked(part) for part in self._parts(item)]
        except RecursionError:
            raise UnusableError(
                "nested too deeply: the row has hundreds of nested lists or objects"
            ) from None

    def is_plain_text(self, row: Row) -> bool:
        """Return True if training treats a row as plain text."""
        with suppress(UnusableError, RecursionError):
            return isinstance(self._parser.parse(row), Continuation)
        return False

    def prompt(self, row: Row, *, is_text: Callable[[], bool]) -> Prompt:
        """Return the prompt before a row's last answer, as in training. The row may lack the
        answer. `is_text`: True if `prompt` without other columns is plain text, False if it is a
        user message. Raises `UnusableError`.
        """
        item = self._parser.question(row, is_text=is_text)
        if isinstance(item, Conversation):
            template = self._template(item.tools)
            messages = [template.with_arguments(message) for message in item.messages]
            last = messages.pop() if messages[-1]["role"] == "assistant" else {}
            text, _ = template.render(messages, item.tools, prompt=True) if messages else ("", [])
            answer = last.get("content")
        elif isinstance(item, Continuation):
            text = item.prompt
            answer = self._without_end(item.text)
        else:
            raise UnusableError("no question: the row contains token ids")
        if not text:
            raise UnusableError("no question: the row has nothing before its answer")
        ids = self._finder.ids(text)
        if isinstance(item, Continuation):
            ids = self._begun(ids)
        return Prompt(text, ids, answer or None)

    def _parts(self, item: Conversation) -> Sequence[Part]:
        """Render a conversation and divide it into samples according to `data.turns` and
        `data.train_on`.

        Raises `UnusableError`.
        """
        tools = item.tools
        template = self._template(tools)
        messages = [template.with_arguments(message) for message in item.messages]
        if self.options.special_in_content == "error":
            named: dict[str, Any] = {
                f"message {number} ({message['role']})": message
                for number, message in enumerate(messages, start=1)
            }
            template.structural_tokens.require_none({**named, "a tool definition": tools})
        renderings = Renderings(template, messages, tools)
        if not renderings.turns:
            raise UnusableError(
                f"no assistant turn: {len(messages)} messages, none with role 'assistant'"
            )
        asked = renderings.turns[-1:] if self.options.train_on == "last" else renderings.turns
        trained = [index for index in asked if index not in item.untrained]
        parts = renderings.divide(trained, self.options.turns, self.seen)
        for part in parts:
            self.seen.num_without_reasoning += count_missing_reasoning(template, part, tools)
        for message in messages:
            self.seen.unread_keys.update(message.keys() - READ_KEYS - template.words)
        return parts

    def _template(self, tools: Tools) -> ChatTemplate:
        """Return the chat template for conversations with or without these tools. Raises
        `DataError`.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, which is usual for base models.\n"
                "Fix: set data.chat_template to chatml, llama3, plain or a jinja file"
            )
        source = self.tokenizer.get_chat_template(tools=tools)
        if source not in self._templates:
            variables = self.options.template_kwargs
            self._templates[source] = ChatTemplate(
                source, self.tokenizer, variables, special=self._special
            )
        return self._templates[source]

    def _encoded_text(self, item: Continuation) -> Encoded:
        """Return the sample of a prompt and a supervised text. Raises `UnusableError`."""
        text = self._without_end(item.text)
        if not text.strip():
            raise UnusableError("empty text: there is nothing to supervise")
        whole = item.prompt + text
        require_unicode(whole)
        if self.options.special_in_content == "error":
            self._special.require_none({"the text": whole})
        _, end_id = self._text_ends
        self.seen.end_token_ids.add(end_id)
        span = len(item.prompt), len(whole)
        found, [(first, end)] = self._located(MarkedText(whole, [span]))
        ids = [*self._begun(found.tolist()), end_id]
        num_trained = end - first + 1
        loss_mask = np.arange(len(ids)) >= len(ids) - num_trained
        return Encoded(np.array(ids, dtype=np.int32), loss_mask)

    def _begun(self, ids: list[int]) -> list[int]:
        """Return the ids of a text, preceded by the ids that the tokenizer adds before it."""
        lead, _ = self._text_ends
        return ids if ids[: len(lead)] == lead else lead + ids

    def _without_end(self, text: str) -> str:
        return text.removesuffix(str(self.tokenizer.eos_token))

    @cached_property
    def _text_ends(self) -> tuple[list[int], int]:
        """The ids that the tokenizer adds before a text, and the id of its end token. Raises
        `DataError` if the tokenizer has no end token.
        """
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end token (eos_token), which plain text needs.\n"
                "Fix: set eos_token in the model's tokenizer_config.json"
            )
        [first, *_] = tokenizer.encode("a", add_special_tokens=False)
        with_all = tokenizer.encode("a")
        return with_all[: with_all.index(first)], int(tokenizer.eos_token_id)

    def _masked(self, part: Part) -> Encoded:
        """Return the sample of a part of a conversation. Raises `UnusableError`."""
        input_ids, bounds = self._located(part)
        loss_mask = np.zeros(len(input_ids), dtype=bool)
        for first, last in bounds:
            end_id = int(input_ids[last - 1])
            if first == last or end_id not in self._added_tokens:
                raise UnusableError(
                    "chat template: the text that ends a turn is not a single token; add it to the "
                    "tokenizer as a special token"
                )
            loss_mask[first:last] = True
            self.seen.end_token_ids.add(end_id)
        return Encoded(input_ids, loss_mask)

    def _located(self, item: MarkedText) -> tuple[np.ndarray, list[Span]]:
        """Return the token ids of a text, and the range of the tokens in each span.

        A server tokenizes the prompt alone. If a token crosses the start of a span, the text before
        and after that place is tokenized separately. Raises `UnusableError` if that changes the
        text.
        """
        input_ids, bounds, crossed = self._finder.find(item)
        if crossed:
            whole = self._decoded(input_ids)
            input_ids, bounds = self._finder.find_apart(item, crossed)
            if self._decoded(input_ids) != whole:
                raise UnusableError(
                    "split token: one token holds the end of the prompt and the beginning of the "
                    "supervised text, and this tokenizer changes the text if they are separated; "
                    "remove whitespace from the beginning of the text, or from the end of the "
                    "prompt (if that is a header of the template, change data.chat_template)"
                )
        return input_ids, bounds

    def _decoded(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def _note_ends(self, sample: Encoded) -> None:
        """Record the special tokens that end supervised parts of a row with token ids."""
        is_last = sample.loss_mask & ~np.append(sample.loss_mask[1:], False)
        for number in sample.input_ids[is_last].tolist():
            if number in self._added_tokens and self._added_tokens[number].special:
                self.seen.end_token_ids.add(number)
