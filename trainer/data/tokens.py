"""Turns marked texts into token ids, and finds the tokens that start inside the marks."""

import hashlib
import json
import unicodedata
from bisect import bisect_left
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
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
        self._backend = _made(state, tokenizer)
        # normalizing text that is already NFC would take a sixth of the time
        self._backend_of_normalized = self._backend
        added = [token["content"] for token in state["added_tokens"]]
        if state["normalizer"] == {"type": "NFC"} and all(map(_is_normalized, added)):
            state["normalizer"] = None
            self._backend_of_normalized = _made(state, tokenizer)
        self._num_bytes = _num_bytes(state) if _is_byte_level(state) else None
        self._added = {token["id"]: token["content"] for token in state["added_tokens"]}

    def find(self, batch: list[MarkedText]) -> list[Located]:
        """Return for each text its token ids and the tokens in its spans.

        Whitespace that an added token absorbs does not count as a part of it.
        """
        texts = [item.text for item in batch]
        is_normalized = all(map(_is_normalized, texts))
        backend = self._backend_of_normalized if is_normalized else self._backend
        if self._num_bytes is None or not is_normalized:
            encodings = backend.encode_batch(texts, add_special_tokens=False)
            return [self._located(*found) for found in zip(batch, encodings, strict=True)]
        located = []
        # encoding without offsets takes an eighth less time
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for item, encoding in zip(batch, encodings, strict=True):
            found = _located_by_bytes(item, encoding, self._num_bytes)
            if found is None:
                found = self._located(item, backend.encode(item.text, add_special_tokens=False))
            located.append(found)
        return located

    def find_apart(self, item: MarkedText, cuts: list[int]) -> tuple[np.ndarray, list[Span]]:
        """Cut a text at starts of spans, and tokenize each piece alone."""
        ids: list[int] = []
        bounds: list[Span] = []
        for start, end in pairwise([0, *cuts, len(item.text)]):
            spans = [(at - start, to - start) for at, to in item.spans if start <= at < end]
            [(found, inside, _)] = self.find([MarkedText(item.text[start:end], spans)])
            bounds += [(len(ids) + first, len(ids) + last) for first, last in inside]
            ids += found.tolist()
        return np.array(ids, dtype=np.int32), bounds

    def ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _located(self, item: MarkedText, encoding: Encoding) -> Located:
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


def _made(state: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _is_normalized(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def _is_byte_level(state: dict[str, Any]) -> bool:
    """Return True if the tokens of a text contain exactly its bytes, except for whitespace that
    added tokens absorb.
    """
    steps = state["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    if state["normalizer"] is not None or steps[-1].get("type") != "ByteLevel":
        return False
    adds_bytes = any(
        step["type"] not in ("Split", "Digits", "ByteLevel") or step.get("add_prefix_space")
        for step in steps
    )
    model = state["model"]
    affixes = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    adds_bytes |= any(map(model.get, affixes))
    return model["type"] == "BPE" and not adds_bytes


def _num_bytes(state: dict[str, Any]) -> np.ndarray:
    """Return the number of bytes of each token of a byte-level vocabulary, by id."""
    sizes = {number: len(text) for text, number in state["model"]["vocab"].items()}
    sizes |= {token["id"]: len(token["content"].encode()) for token in state["added_tokens"]}
    found = np.zeros(max(sizes) + 1, dtype=np.int64)
    found[list(sizes)] = list(sizes.values())
    return found


def _located_by_bytes(
    item: MarkedText, encoding: Encoding, num_bytes: np.ndarray
) -> Located | None:
    """Return the result of `TokenFinder._located`, computed without offsets; None if a token absorbed
    whitespace.
    """
    input_ids = np.array(encoding.ids, dtype=np.int32)
    sizes = num_bytes[input_ids]
    ends = np.cumsum(sizes)
    text = item.text
    if ends[-1] != len(text.encode()):
        return None
    bounds = [bound for span in item.spans for bound in span]
    if not text.isascii():
        bounds = [len(text[:bound].encode()) for bound in bounds]
    tokens = (ends - sizes).searchsorted(bounds)
    first_tokens = tokens.tolist()
    spans = list(zip(first_tokens[::2], first_tokens[1::2], strict=True))
    is_crossed = np.append(0, ends)[tokens] > bounds
    starts = [first for first, _ in item.spans]
    return input_ids, spans, list(compress(starts, is_crossed[::2]))


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
