"""Turns rows into samples.

The chat template renders conversations; plain text is not rendered. Both are tokenized in batches.
Spans of characters mark the supervised parts, each including its end token. The tokens that start
inside a span are supervised.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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

# one call of the tokenizer: enough text for all cores, but each token takes over 100 bytes during the call
BATCH_CHARS = 300_000
READ_KEYS = frozenset(("role", "content", "tool_calls", *REASONING_KEYS))

Marked = Sequence[MarkedText] | Encoded | UnusableError
"""The texts of a row, its tokens if it already holds tokens, or the reason why it is unusable."""
Result = list[Encoded] | UnusableError


@dataclass(frozen=True)
class Prompt:
    """The text before the answer of a row, its tokens, and the answer."""

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

    def encode(self, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield the samples of each row, in row order, or the reason why the row has none."""
        batch: list[Marked] = []
        num_chars = 0
        for row in rows:
            marked = self._marked(row)
            batch.append(marked)
            if isinstance(marked, list):
                num_chars += sum(len(sample.text) for sample in marked)
            if num_chars >= BATCH_CHARS:
                yield from self._encoded_batch(batch)
                batch = []
                num_chars = 0
        yield from self._encoded_batch(batch)

    def is_plain_text(self, row: Row) -> bool:
        """Return True if training reads a row as plain text."""
        with suppress(UnusableError, RecursionError):
            return isinstance(self._parser.parse(row), Continuation)
        return False

    def prompt(self, row: Row, *, is_text: Callable[[], bool]) -> Prompt:
        """Return the prompt of a row's last answer, as in training, also if the row lacks the
        answer. `is_text` says whether a lone `prompt` is plain text or a user message. Raises
        `UnusableError`.
        """
        item = self._parser.question(row, is_text=is_text)
        lead: list[int] = []
        if isinstance(item, Conversation):
            template = self._template(item.tools)
            messages = [template.with_arguments(message) for message in item.messages]
            last = messages.pop() if messages[-1]["role"] == "assistant" else {}
            text, _ = template.render(messages, item.tools, prompt=True) if messages else ("", [])
            answer = last.get("content")
        elif isinstance(item, Continuation):
            text = item.prompt
            answer = self._without_end(item.text)
            lead, _ = self._text_ends
        else:
            raise UnusableError("no question: the row holds tokens")
        if not text:
            raise UnusableError("no question: the row has nothing before its answer")
        ids = self._finder.ids(text)
        if ids[: len(lead)] != lead:
            ids = lead + ids
        return Prompt(text, ids, answer or None)

    def _encoded_batch(self, batch: list[Marked]) -> Iterator[Result]:
        """Tokenize all texts of a batch at once, and yield the samples of each row or the reason
        why it has none.
        """
        texts = [item for samples in batch if isinstance(samples, list) for item in samples]
        located = iter(self._finder.find(texts))
        for samples in batch:
            if isinstance(samples, UnusableError):
                yield samples
            elif isinstance(samples, Encoded):
                yield [samples]
            else:
                found = [(item, next(located)) for item in samples]
                try:
                    yield [self._masked(item, *tokens) for item, tokens in found]
                except UnusableError as error:
                    yield error

    def _marked(self, row: Row) -> Marked:
        """Return the texts of a row with their supervised spans, or the reason why the row cannot
        be used.
        """
        try:
            item = self._parser.parse(row)
            if isinstance(item, Conversation):
                return self._marked_conversation(item)
            if isinstance(item, Continuation):
                return [self._marked_text(item)]
            self._note_ends(item)
            return item
        except UnusableError as error:
            return error
        except RecursionError:
            return UnusableError(
                "nested too deeply: the row has hundreds of lists or objects inside each other"
            )

    def _marked_conversation(self, item: Conversation) -> Sequence[MarkedText]:
        """Render a conversation and divide it into samples as `data.turns` and `data.train_on` say.

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

    def _marked_text(self, item: Continuation) -> MarkedText:
        """Return prompt and text together, with the text as the only span. Raises
        `UnusableError`.
        """
        text = self._without_end(item.text)
        if not text.strip():
            raise UnusableError("empty text: there is nothing to supervise")
        whole = item.prompt + text
        require_unicode(whole)
        if self.options.special_in_content == "error":
            self._special.require_none({"the text": whole})
        return MarkedText(whole, [(len(item.prompt), len(whole))])

    def _without_end(self, text: str) -> str:
        return text.removesuffix(str(self.tokenizer.eos_token))

    @cached_property
    def _text_ends(self) -> tuple[list[int], int]:
        """The ids that the tokenizer puts before a text, and the id of its end token. Raises
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

    def _masked(
        self, item: MarkedText, input_ids: np.ndarray, bounds: list[Span], crossed: list[int]
    ) -> Encoded:
        """Return the sample of a text with its spans. Raises `UnusableError`.

        A server tokenizes the prompt alone. If a token crosses the start of a supervised part, the
        text before and after that place is tokenized separately.
        """
        if not isinstance(item, Part):
            return self._encoded_text(item, input_ids, bounds[0][0])
        if crossed:
            whole = self._decoded(input_ids.tolist())
            input_ids, bounds = self._finder.find_apart(item, crossed)
            if self._decoded(input_ids.tolist()) != whole:
                raise UnusableError(
                    "split token: one token holds the end of the prompt and the beginning of the "
                    "assistant's text, and this tokenizer changes the text if they are separated; "
                    "remove whitespace from the beginning of the text, or from the end of the "
                    "template's header (data.chat_template)"
                )
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

    def _encoded_text(self, item: MarkedText, ids: np.ndarray, num_prompt: int) -> Encoded:
        """Return the sample of a text. `ids` are the tokens of prompt and text together, of which
        `num_prompt` start in the prompt.

        The prompt has the same tokens as on a server, which tokenizes it alone. If a token crosses
        the border, prompt and text are tokenized separately. Raises `UnusableError` if that changes
        the text.
        """
        lead, end_id = self._text_ends
        self.seen.end_token_ids.add(end_id)
        ((start, _),) = item.spans
        prompt = self._finder.ids(item.text[:start])
        whole = ids.tolist()
        if whole[:num_prompt] != prompt:
            apart = prompt + self._finder.ids(item.text[start:])
            if self._decoded(apart) != self._decoded(whole):
                raise UnusableError(
                    "split token: one token holds the end of the prompt and the beginning of the "
                    "text"
                )
            whole = apart
        if whole[: len(lead)] == lead:
            lead = []
        input_ids = np.array([*lead, *whole, end_id], dtype=np.int32)
        return Encoded(input_ids, np.arange(len(input_ids)) >= len(lead) + len(prompt))

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _note_ends(self, sample: Encoded) -> None:
        """Remember the special tokens that end supervised parts of a row that holds tokens."""
        is_last = sample.loss_mask & ~np.append(sample.loss_mask[1:], False)
        for number in sample.input_ids[is_last].tolist():
            if number in self._added_tokens and self._added_tokens[number].special:
                self.seen.end_token_ids.add(number)
