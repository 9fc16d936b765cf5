"""Turns marked texts into token ids, and finds the tokens that start inside the marks."""

import hashlib
import json
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from trainer.data.rows import UnusableError

Span = tuple[int, int]
Located = tuple[np.ndarray, list[Span], list[int]]
"""Token ids (int32), the half-open range of the tokens that start in each span, and the starts of
spans that are inside a token.
"""


@dataclass(frozen=True)
class Encoded:
    """Token ids of one sample (int32), and a mask of the supervised tokens (bool, same length)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class MarkedText:
    """A non-empty text, and ascending, disjoint spans of its characters."""

    text: str
    spans: list[Span]


def require_unicode(text: str) -> None:
    """Raise `UnusableError` for text that cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UnusableError(f"bad unicode: half of a surrogate pair, {half!r}") from None


class TokenFinder:
    """Tokenizes marked texts with a fast tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # some post-processors exclude spaces from the offsets
        state |= {"post_processor": None, "truncation": None, "padding": None}
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._added = {token["id"]: token["content"] for token in state["added_tokens"]}

    def find(self, item: MarkedText) -> Located:
        """Return the token ids of a text, and the tokens in its spans.

        Whitespace that an added token absorbs does not count as a part of it.
        """
        encoding = self._backend.encode(item.text, add_special_tokens=False)

        def start(token: int) -> int:
            first, _ = encoding.token_to_chars(token) or (0, 0)
            return first

        def end(token: int) -> int:
            _, last = encoding.token_to_chars(token) or (0, 0)
            content = self._added.get(encoding.ids[token])
            return last if content is None else start(token) + len(content)

        places = range(len(encoding))
        bounds = [
            (bisect_left(places, first, key=start), bisect_left(places, last, key=start))
            for first, last in item.spans
        ]
        crossed = [
            first
            for (first, _), (token, _) in zip(item.spans, bounds, strict=True)
            if token and end(token - 1) > first
        ]
        return np.array(encoding.ids, dtype=np.int32), bounds, crossed

    def find_apart(self, item: MarkedText, cuts: list[int]) -> tuple[np.ndarray, list[Span]]:
        """Cut a text at starts of spans, and tokenize each piece alone."""
        ids: list[int] = []
        bounds: list[Span] = []
        for start, end in pairwise([0, *cuts, len(item.text)]):
            spans = [(at - start, to - start) for at, to in item.spans if start <= at < end]
            found, inside, _ = self.find(MarkedText(item.text[start:end], spans))
            bounds += [(len(ids) + first, len(ids) + last) for first, last in inside]
            ids += found.tolist()
        return np.array(ids, dtype=np.int32), bounds

    def ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 of everything that determines the ids of a conversation: vocabulary, merges,
    special tokens, chat template.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("truncation", None)  # left over from the tokenizer's last call
    backend.pop("padding", None)
    parts = [
        backend,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.split_special_tokens,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
