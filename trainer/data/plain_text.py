"""Plain text to tokens, without a chat template."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.content import StructuralTokens
from trainer.data.formats import Continuation
from trainer.data.rows import UnusableError
from trainer.data.tokens import Encoded, MarkedText, TokenFinder, require_unicode
from trainer.errors import DataError


class TextEncoder:
    """Puts the tokenizer's beginning before a text and its end token after it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_in_content: str) -> None:
        """Raises `DataError` for a tokenizer without an end token."""
        if tokenizer.eos_token_id is None:
            raise DataError(
                "plain text ends with the tokenizer's end token (eos_token), and this one has none"
            )
        self._tokenizer, self._special_in_content = tokenizer, special_in_content
        self.end_id = int(tokenizer.eos_token_id)
        added = tokenizer.added_tokens_decoder.values()
        self._special = StructuralTokens(
            frozenset(token.content for token in added if token.special)
        )
        [first, *_] = tokenizer.encode("a", add_special_tokens=False)
        with_all = tokenizer.encode("a")
        self._lead = with_all[: with_all.index(first)]

    def marked(self, item: Continuation) -> MarkedText:
        """Return the whole text with its supervised part as the one span. Raises `UnusableError`."""
        text = item.text.removesuffix(str(self._tokenizer.eos_token))
        if not text.strip():
            raise UnusableError("empty text: there is nothing to supervise")
        whole = item.prompt + text
        require_unicode(whole)
        spans = [(len(item.prompt), len(whole))]
        token = self._special.first_in(whole)
        if token is None or self._special_in_content == "parse":
            return MarkedText(whole, spans, prompt=item.prompt)
        if self._special_in_content == "error":
            raise UnusableError(
                f"special token in content: the text contains {token!r}; remove it, or set "
                f"data.special_in_content=parse if the text is rendered already, text for ordinary "
                f"characters"
            )
        return self._special.exchange(
            MarkedText(self._special.hide(whole), spans, prompt=item.prompt)
        )

    def encoded(
        self, item: MarkedText, ids: np.ndarray, num_prompt: int, finder: TokenFinder
    ) -> Encoded:
        """Take `ids` of the whole text, `num_prompt` of them before the span.

        The prompt's tokens are those that a server makes of the prompt alone: where a token of the
        whole crosses the border, prompt and text are tokenized apart. Raises `UnusableError` where
        that changes the text.
        """
        prompt, whole = finder.ids(item.prompt or ""), ids.tolist()
        if whole[:num_prompt] != prompt:
            apart = prompt + finder.ids(item.text[item.spans[0][0] :])
            if self._decoded(apart) != self._decoded(whole):
                raise UnusableError(
                    "split token: one token holds the end of the prompt and the begin of the text"
                )
            whole = apart
        lead = [] if whole[: len(self._lead)] == self._lead else self._lead
        input_ids = np.array([*lead, *whole, self.end_id], dtype=np.int32)
        return Encoded(input_ids, np.arange(len(input_ids)) >= len(lead) + len(prompt))

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
