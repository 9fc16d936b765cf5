"""Marked texts to token ids, and to the tokens that start inside the marks.

Any fast tokenizer tells by offsets where its tokens start. Byte-level ones are spared that work: an id alone tells how
many bytes of the text it stands for. And where texts can be cut into words, each is tokenized once per batch.

Shapes: B bytes, T tokens, W words, D texts of a batch, laid end to end; V different words. With a 1: bounds, one more.
"""

import itertools
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Encoding, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from trainer.data.rows import UnusableError
from trainer.errors import DataError

Span = tuple[int, int]
Located = tuple[np.ndarray, list[Span]]
_CONTRACTIONS, _WHITESPACE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {
    "qwen 2 and 3": (_CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITESPACE),
    "qwen 3.5": (_CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _WHITESPACE),
    "llama 3": (_CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITESPACE),
}
"""How pre-tokenizers cut texts, where a space that follows anything but whitespace is always cut in front of, and the
parts before and from there do not depend on each other. GPT-2's way, named `use_regex`, is another one."""
SPACE = ord(" ")
FIRST_PRIVATE = 0x10F000  # in the last plane for private use: no writing system and no normalizer knows them
MAY_BE_WHITESPACE = np.isin(np.arange(256), [0xC2, 0x9A, 0x80, 0x81])
"""By the last byte but one of a character beyond ASCII, in UTF-8: never false for whitespace."""


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
    """Added tokens that stand in the text as their aliases; their own characters are ordinary ones."""
    prompt: str | None = None
    """What a plain text goes on from, in front of its one span; None: the text is a conversation's."""


def require_unicode(text: str) -> None:
    """Raises `UnusableError` for what no encoding can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableError(f"bad unicode: half of a surrogate pair, {text[error.start]!r}") from None


def aliases(tokens: frozenset[str]) -> dict[str, str]:
    """For each token a text of its length out of characters for private use."""
    return {token: chr(FIRST_PRIVATE + number) * len(token) for number, token in enumerate(sorted(tokens))}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of `texts`; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


class TokenFinder:
    """Tokenizes marked texts with a fast tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, aliased: frozenset[str] = frozenset()) -> None:
        """`aliased`: added tokens that the texts hold as their aliases. Raises `DataError` where that cannot be."""
        self._tokenizer, self._aliased = tokenizer, aliased
        self._byte_level = _byte_level(_plain_copy(tokenizer, aliased))

    def start(self, batch: list[MarkedText], pool: Executor) -> Callable[[], list[Located]]:
        """Leave the tokenizer's work to `pool`; call what comes back to wait for it and for the result.

        For each text: its token ids, int32, and for each span the half-open range of the tokens that start inside.
        Where these end is not asked for: a special token may take in the whitespace after it.
        """
        byte_level = self._byte_level
        if byte_level is None or not all(unicodedata.is_normalized("NFC", item.text) for item in batch):
            encodings = pool.submit(self._encode_with_offsets, batch)
            return lambda: _by_offsets(batch, encodings.result())
        words = byte_level.cut(batch)
        new = pool.submit(byte_level.backend.encode_batch_fast, words.new_texts, add_special_tokens=False)

        def finish() -> list[Located]:
            located = byte_level.locate(batch, words, new.result())
            return _by_offsets(batch, self._encode_with_offsets(batch)) if located is None else located

        return finish

    def ids(self, text: str) -> list[int]:
        """Of one text."""
        return list(self._with_offsets.encode(text, add_special_tokens=False).ids)

    def _encode_with_offsets(self, batch: list[MarkedText]) -> list[Encoding]:
        return self._with_offsets.encode_batch([item.text for item in batch], add_special_tokens=False)

    @cached_property
    def _with_offsets(self) -> Tokenizer:
        return _plain_copy(self._tokenizer, self._aliased)


def _plain_copy(tokenizer: PreTrainedTokenizerBase, aliased: frozenset[str]) -> Tokenizer:
    """Without post-processor: some of these cut spaces off the offsets, and plain ids need none."""
    source = tokenizer.backend_tokenizer
    backend = _with_aliases(source, aliases(aliased)) if aliased else Tokenizer.from_str(source.to_str())
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _with_aliases(source: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """A copy that knows added tokens by other names, under the same ids."""
    state = json.loads(source.to_str())
    state["post_processor"] = None
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocab = state["model"]["vocab"]  # sentencepiece keeps them there too
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        state["model"]["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    backend = Tokenizer.from_str(json.dumps(state))
    if any(backend.token_to_id(alias) != source.token_to_id(token) for token, alias in names.items()):
        raise DataError("this tokenizer cannot read its special tokens as text: set data.special_in_content=error")
    return backend


def _by_offsets(batch: list[MarkedText], encodings: list[Encoding]) -> list[Located]:
    return [
        (
            np.array(encoding.ids, dtype=np.int32),
            [(_first_token(encoding, first), _first_token(encoding, end)) for first, end in item.spans],
        )
        for item, encoding in zip(batch, encodings, strict=True)
    ]


def _first_token(encoding: Encoding, position: int) -> int:
    """The first token that starts at this character or behind it."""

    def start(token: int) -> int:
        first, _ = encoding.token_to_chars(token) or (0, 0)  # None stands for tokens out of range
        return first

    return bisect_left(range(len(encoding)), position, key=start)


@dataclass(frozen=True)
class _Words:
    """A batch cut into words. The different ones are numbered in the order in which they are first seen."""

    index_W: np.ndarray
    bytes_V1: np.ndarray
    """Where the different words lie, in bytes."""
    words_D1: np.ndarray
    bytes_D1: np.ndarray
    """Where the texts lie, in words and in bytes."""
    new_texts: list[str]
    """Each text without the words seen before it: to the tokenizer a text like any other, cut in the same places."""


@dataclass(frozen=True)
class _ByteLevel:
    """A byte-level tokenizer without its normalizer, for texts that are normalized."""

    backend: Tokenizer
    num_bytes: np.ndarray
    """Length of the text behind each id, int64."""
    has_words: bool
    """Whether a space that follows anything but whitespace starts a word."""

    def cut(self, batch: list[MarkedText]) -> _Words:
        texts = [item.text.encode() for item in batch]
        data = b"".join(texts)
        bytes_D1 = np.cumsum([0, *map(len, texts)])
        starts_W = self._word_starts(np.frombuffer(data, dtype=np.uint8), bytes_D1[:-1])
        words_D1 = np.searchsorted(starts_W, bytes_D1)
        buffers = [None, pa.py_buffer(np.append(starts_W, len(data))), pa.py_buffer(data)]
        words = pc.dictionary_encode(pa.Array.from_buffers(pa.large_binary(), len(starts_W), buffers))
        index_W = words.indices.to_numpy()
        _, bounds, different = words.dictionary.buffers()
        bytes_V1 = np.frombuffer(bounds, dtype=np.int64)[: len(words.dictionary) + 1]
        num_seen_W1 = np.append(0, np.maximum.accumulate(index_W) + 1)
        new_bytes = different.to_pybytes()
        new_bounds = itertools.pairwise(bytes_V1[num_seen_W1[words_D1]].tolist())
        return _Words(index_W, bytes_V1, words_D1, bytes_D1, [new_bytes[a:b].decode() for a, b in new_bounds])

    def _word_starts(self, bytes_B: np.ndarray, starts_D: np.ndarray) -> np.ndarray:
        is_start_B = np.zeros(len(bytes_B), dtype=bool)
        if self.has_words:
            spaces = np.flatnonzero(bytes_B == SPACE)
            last, last_but_one = (bytes_B.take(spaces - back, mode="clip") for back in (1, 2))
            is_start_B[spaces] = (last > SPACE) & ~MAY_BE_WHITESPACE[last_but_one]
        is_start_B[starts_D] = True
        return np.flatnonzero(is_start_B)

    def locate(self, batch: list[MarkedText], words: _Words, encodings: list[Encoding]) -> list[Located] | None:
        """None where the tokens do not add up to the words."""
        new_ids = np.fromiter(itertools.chain.from_iterable(encoding.ids for encoding in encodings), dtype=np.int32)
        ends = np.append(0, np.cumsum(self.num_bytes[new_ids]))
        tokens_V1 = np.searchsorted(ends, words.bytes_V1)
        if ends[-1] != words.bytes_V1[-1] or not np.array_equal(ends[tokens_V1], words.bytes_V1):
            return None
        num_tokens_W = np.diff(tokens_V1)[words.index_W]
        tokens_W1 = np.append(0, np.cumsum(num_tokens_W))
        shifts_W = tokens_V1[words.index_W] - tokens_W1[:-1]
        ids_T = new_ids[np.arange(tokens_W1[-1]) + np.repeat(shifts_W, num_tokens_W)]
        num_bytes_T = self.num_bytes[ids_T]
        starts_T = np.cumsum(num_bytes_T) - num_bytes_T
        bytes_D = words.bytes_D1[:-1].tolist()
        marks = [first + mark for item, first in zip(batch, bytes_D, strict=True) for mark in _byte_marks(item)]
        found = iter(np.searchsorted(starts_T, marks).tolist())
        return [
            (ids_T[first:end], [(next(found) - first, next(found) - first) for _ in item.spans])
            for item, (first, end) in zip(batch, itertools.pairwise(tokens_W1[words.words_D1].tolist()), strict=True)
        ]


def _byte_marks(item: MarkedText) -> list[int]:
    """Both ends of each span, counted in bytes."""
    marks = itertools.chain.from_iterable(item.spans)
    return list(marks) if item.text.isascii() else [len(item.text[:mark].encode()) for mark in marks]


def _byte_level(backend: Tokenizer) -> _ByteLevel | None:
    """None for a tokenizer of another kind, or one whose ids do not tell what they stand for."""
    state = json.loads(backend.to_str())
    model, added = state["model"], state["added_tokens"]
    steps = _steps(state["pre_tokenizer"])
    is_byte_level = (
        model["type"] == "BPE"
        and not (model["dropout"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"])
        and model["vocab"].keys() >= set(ByteLevel.alphabet())  # else bytes are lost or become unknown
        and [step["type"] for step in _steps(state["normalizer"])] in ([], ["NFC"])
        and [step["type"] for step in steps if step["type"] not in ("Split", "Digits")] == ["ByteLevel"]
        and not any(step.get("add_prefix_space") for step in steps)
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    )
    if not is_byte_level:
        return None
    num_bytes = {token_id: len(text) for text, token_id in model["vocab"].items()}  # one character for each byte
    num_bytes |= {token["id"]: len(token["content"].encode()) for token in added}
    table = np.zeros(max(num_bytes) + 1, dtype=np.int64)
    table[list(num_bytes)] = list(num_bytes.values())
    crosses_words = any(re.search(r"\S ", token["content"]) for token in added)
    backend.normalizer = None
    return _ByteLevel(backend, table, has_words=_has_words(steps) and not crosses_words)


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    steps: list[dict[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or [part]
    return steps


def _has_words(steps: list[dict[str, Any]]) -> bool:
    if len(steps) == 1:
        return bool(steps[0]["use_regex"])  # GPT-2's pattern
    split = steps[0]
    is_cut_apart = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return len(steps) == 2 and is_cut_apart and split["pattern"].get("Regex") in WORD_PATTERNS.values()
