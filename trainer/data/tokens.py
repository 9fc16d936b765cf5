"""Marked texts to token ids, and to the tokens that start inside the marks."""

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from trainer.data.rows import UnusableError
from trainer.errors import DataError

Span = tuple[int, int]
Located = tuple[np.ndarray, list[Span]]
# in the last plane for private use: no writing system and no normalizer knows them
FIRST_PRIVATE = 0x10F000


@dataclass(frozen=True)
class Encoded:
    """Tokens of one sample (int32) and which of them are supervised (bool, same length)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class MarkedText:
    """A text, not empty, and spans of its characters, ascending and disjoint."""

    text: str
    spans: list[Span]
    aliased: frozenset[str] = frozenset()
    """Added tokens that stand in the text as their aliases; their own characters are ordinary
    ones.
    """
    prompt: str | None = None
    """What a plain text goes on from, in front of its one span; None: the text is a
    conversation's.
    """


def require_unicode(text: str) -> None:
    """Raises `UnusableError` for what no encoding can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableError(
            f"bad unicode: half of a surrogate pair, {text[error.start]!r}"
        ) from None


def aliases(tokens: frozenset[str]) -> dict[str, str]:
    """For each token a text of its length out of characters for private use."""
    return {
        token: chr(FIRST_PRIVATE + number) * len(token)
        for number, token in enumerate(sorted(tokens))
    }


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of `texts`; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


class TokenFinder:
    """Tokenizes marked texts with a fast tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, aliased: frozenset[str] = frozenset()
    ) -> None:
        """`aliased`: added tokens that the texts hold as their aliases. Raises `DataError`
        where that cannot be.
        """
        self._backend = _plain_copy(tokenizer, aliased)
        self._backend_of_normalized = _without_nfc(self._backend)

    def find(self, batch: list[MarkedText]) -> list[Located]:
        """For each text: its token ids, int32, and for each span the half-open range of the tokens
        that start inside.

        Where these end is not asked for: a special token may take in the whitespace after it.
        """
        is_normalized = all(unicodedata.is_normalized("NFC", item.text) for item in batch)
        backend = self._backend_of_normalized if is_normalized else self._backend
        encodings = backend.encode_batch([item.text for item in batch], add_special_tokens=False)
        return [_located(item, encoding) for item, encoding in zip(batch, encodings, strict=True)]

    def ids(self, text: str) -> list[int]:
        """Of one text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def _plain_copy(tokenizer: PreTrainedTokenizerBase, aliased: frozenset[str]) -> Tokenizer:
    """Without post-processor: some of these cut spaces off the offsets, and plain ids need none."""
    source = tokenizer.backend_tokenizer
    backend = (
        _with_aliases(source, aliases(aliased)) if aliased else Tokenizer.from_str(source.to_str())
    )
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _without_nfc(backend: Tokenizer) -> Tokenizer:
    """A tokenizer for texts in NFC: normalizing them changes nothing and takes a sixth of the
    time of tokenizing.
    """
    state = json.loads(backend.to_str())
    added = [token["content"] for token in state["added_tokens"]]
    if state["normalizer"] != {"type": "NFC"} or not all(
        unicodedata.is_normalized("NFC", text) for text in added
    ):
        return backend
    state["normalizer"] = None
    return Tokenizer.from_str(json.dumps(state))


def _with_aliases(source: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """A copy that knows added tokens by other names, under the same ids."""
    state = json.loads(source.to_str())
    state["post_processor"] = None
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocab = state["model"]["vocab"]  # sentencepiece keeps them there too
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {
            names.get(text, text): token_id for text, token_id in vocab.items()
        }
    else:
        state["model"]["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    backend = Tokenizer.from_str(json.dumps(state))
    if any(
        backend.token_to_id(alias) != source.token_to_id(token) for token, alias in names.items()
    ):
        raise DataError(
            "this tokenizer cannot read its special tokens as text: set "
            "data.special_in_content=error"
        )
    return backend


def _located(item: MarkedText, encoding: Encoding) -> Located:
    bounds = [
        (_first_token(encoding, first), _first_token(encoding, end)) for first, end in item.spans
    ]
    return np.array(encoding.ids, dtype=np.int32), bounds


def _first_token(encoding: Encoding, position: int) -> int:
    """The first token that starts at this character or behind it."""

    def start(token: int) -> int:
        first, _ = encoding.token_to_chars(token) or (0, 0)  # None stands for tokens out of range
        return first

    return bisect_left(range(len(encoding)), position, key=start)
