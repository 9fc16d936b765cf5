"""Turns marked texts into token ids, and finds the tokens that start inside the marks."""

import hashlib
import json
import unicodedata
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from trainer.data.rows import UnusableError

Span = tuple[int, int]
Located = tuple[np.ndarray, list[Span]]


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

    def find(self, batch: list[MarkedText]) -> list[Located]:
        """Return for each text its token ids (int32), and for each span the half-open range of the
        tokens that start inside it.

        The ends of tokens do not matter, because a special token may include the whitespace after
        it.
        """
        texts = [item.text for item in batch]
        is_normalized = all(map(_is_normalized, texts))
        backend = self._backend_of_normalized if is_normalized else self._backend
        if self._num_bytes is None or not is_normalized:
            encodings = backend.encode_batch(texts, add_special_tokens=False)
            return list(map(_located, batch, encodings))
        located = []
        # encoding without offsets takes an eighth less time
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for item, encoding in zip(batch, encodings, strict=True):
            found = _located_by_bytes(item, encoding, self._num_bytes)
            if found is None:
                found = _located(item, backend.encode(item.text, add_special_tokens=False))
            located.append(found)
        return located

    def ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def _made(state: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _is_normalized(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def _located(item: MarkedText, encoding: Encoding) -> Located:
    def start(token: int) -> int:
        first, _ = encoding.token_to_chars(token) or (0, 0)
        return first

    places = range(len(encoding))
    bounds = [
        (bisect_left(places, first, key=start), bisect_left(places, end, key=start))
        for first, end in item.spans
    ]
    return np.array(encoding.ids, dtype=np.int32), bounds


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
    """Return the result of `_located`, computed without offsets; None if a token absorbed
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
    first_tokens = (ends - sizes).searchsorted(bounds).tolist()
    return input_ids, list(zip(first_tokens[::2], first_tokens[1::2], strict=True))


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
