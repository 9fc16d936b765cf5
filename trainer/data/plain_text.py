"""Plain text to tokens: what a base model goes on with behind a text, or a text as a whole; no
chat template.
"""

from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.content import StructuralTokens
from trainer.data.rows import UnusableError
from trainer.data.tokens import Encoded, MarkedText, Span, TokenFinder, require_unicode
from trainer.errors import DataError


@dataclass(frozen=True)
class Continuation:
    """Text that is supervised, with the end token, behind one that is not, which may be empty."""

    prompt: str
    text: str


class TextEncoder:
    """Puts the tokenizer's beginning in front and its end behind. Raises `DataError` for a
    tokenizer without an end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_in_content: str) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                "plain text ends with the tokenizer's end token (eos_token), and this one has none"
            )
        self._tokenizer, self._special_in_content = tokenizer, special_in_content
        self.end, self.end_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        special = (
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        self._special = StructuralTokens(frozenset(special))
        alone = tokenizer.encode("a", add_special_tokens=False)
        with_all = tokenizer.encode("a")
        lead = with_all[: next((i for i, token in enumerate(with_all) if token == alone[0]), 0)]
        self._lead = np.array(lead, dtype=np.int32)

    def marked(self, item: Continuation) -> MarkedText:
        """Its text is the one span. Raises `UnusableError` where that is empty or has tokens it
        must not have.
        """
        text = item.text.removesuffix(self.end)
        if not text.strip():
            raise UnusableError("empty text: there is nothing to supervise")
        whole = item.prompt + text
        require_unicode(whole)
        span = (len(item.prompt), len(whole))
        if self._special_in_content == "error" and (token := self._special.first_in(whole)):
            raise UnusableError(
                f"special token in content: the text contains {token!r}; remove it, or set "
                f"data.special_in_content=parse if the text is rendered already, text for ordinary "
                f"characters"
            )
        if self._special_in_content == "text" and self._special.first_in(whole):
            return replace(
                self._special.exchange(MarkedText(self._special.hide(whole), [span])),
                prompt=item.prompt,
            )
        return MarkedText(whole, [span], prompt=item.prompt)

    def encoded(
        self, item: MarkedText, ids: np.ndarray, bounds: list[Span], finder: TokenFinder
    ) -> Encoded:
        """`ids` of the whole text. A prompt's are those that a server makes of it alone: where the
        whole has a token across the border, both are tokenized apart. Raises `UnusableError` where
        that is another text.
        """
        num_prompt, prompt_ids = bounds[0][0], finder.ids(item.prompt or "")
        if ids[:num_prompt].tolist() != prompt_ids:
            apart = prompt_ids + finder.ids(item.text[item.spans[0][0] :])
            if self._decoded(apart) != self._decoded(ids.tolist()):
                raise UnusableError(
                    "split token: one token holds the end of the prompt and the begin of the text"
                )
            ids, num_prompt = np.array(apart, dtype=np.int32), len(prompt_ids)
        lead = (
            self._lead if not np.array_equal(ids[: len(self._lead)], self._lead) else self._lead[:0]
        )
        ids = np.concatenate([lead, ids, np.array([self.end_id], dtype=np.int32)])
        return Encoded(ids, np.arange(len(ids)) >= len(lead) + num_prompt)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
