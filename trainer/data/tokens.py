"""Marked texts to token ids, and to the tokens that start inside the marks.

Any fast tokenizer tells by offsets where its tokens start. Byte-level ones are spared that work: an id alone tells how
many bytes of the text it stands for. And where texts can be cut, at words and added tokens, each piece is tokenized
once.

Shapes: B bytes, T tokens, W words, D texts of a batch, laid end to end; V different words. With a 1: bounds, one more.
"""

import itertools
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
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
ID = np.dtype(np.int32)
NUM_KNOWN, KNOWN_BYTES = 1 << 15, 32  # words, and how long they may be: about 8 MB
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

    def find(self, batch: list[MarkedText]) -> list[Located]:
        """For each text: its token ids, int32, and for each span the half-open range of the tokens that start inside.

        Where these end is not asked for: a special token may take in the whitespace after it.
        """
        located = None
        if self._byte_level is not None and all(unicodedata.is_normalized("NFC", item.text) for item in batch):
            located = self._byte_level.locate(batch, self._byte_level.cut(batch))
        return _by_offsets(batch, self._encode_with_offsets(batch)) if located is None else located

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
    """A batch cut into words."""

    different: list[bytes]
    """In the order in which they are first seen."""
    index_W: np.ndarray
    """Which of these it is."""
    words_D1: np.ndarray
    bytes_D1: np.ndarray
    """Where the texts lie, in words and in bytes."""


@dataclass(frozen=True)
class _ByteLevel:
    """A byte-level tokenizer without its normalizer, for texts that are normalized."""

    backend: Tokenizer
    num_bytes: np.ndarray
    """Length of the text behind each id, int64."""
    has_words: bool
    """Whether a space that follows anything but whitespace starts a word."""
    added: re.Pattern[bytes]
    """Added tokens that are always cut out: what stands before and behind one does not depend on each other."""
    known: dict[bytes, bytes] = field(default_factory=dict)
    """Ids of words that were met, as bytes."""

    def cut(self, batch: list[MarkedText]) -> _Words:
        texts = [item.text.encode() for item in batch]
        data = b"".join(texts)
        bytes_D1 = np.cumsum([0, *map(len, texts)])
        starts_W = np.union1d(self._word_starts(data), self._bounds(data, bytes_D1))[:-1]
        words_D1 = np.searchsorted(starts_W, bytes_D1)
        buffers = [None, pa.py_buffer(np.append(starts_W, len(data))), pa.py_buffer(data)]
        words = pc.dictionary_encode(pa.Array.from_buffers(pa.large_binary(), len(starts_W), buffers))
        return _Words(words.dictionary.to_pylist(), words.indices.to_numpy(), words_D1, bytes_D1)

    def _word_starts(self, text: bytes) -> np.ndarray:
        """Of the words that start with a space."""
        bytes_B = np.frombuffer(text, dtype=np.uint8)
        spaces = np.flatnonzero(bytes_B == SPACE) if self.has_words else np.arange(0)
        last, last_but_one = (bytes_B.take(spaces - back, mode="clip") for back in (1, 2))
        return spaces[(last > SPACE) & ~MAY_BE_WHITESPACE[last_but_one]]

    def _bounds(self, data: bytes, bytes_D1: np.ndarray) -> np.ndarray:
        """Of texts, and of the added tokens in them; none of these where one would lie in two texts."""
        spans = np.array([match.span() for match in self.added.finditer(data)], dtype=np.int64).reshape(-1, 2)
        texts = np.searchsorted(bytes_D1, spans - [-1, 0])
        return bytes_D1 if (texts[:, 0] != texts[:, 1]).any() else np.append(bytes_D1, spans)

    def locate(self, batch: list[MarkedText], words: _Words) -> list[Located] | None:
        """None where the tokens do not add up to the words."""
        tokens = self._tokens(words.different)
        if tokens is None:
            return None
        tokens_V1 = np.cumsum([0, *map(len, tokens)]) // ID.itemsize
        new_ids = np.frombuffer(b"".join(tokens), dtype=ID)
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

    def _tokens(self, words: list[bytes]) -> list[bytes] | None:
        """The ids of each word, as bytes."""
        new = [word for word in words if word not in self.known]
        data, bytes_V1 = b"".join(new), np.cumsum([0, *map(len, new)])
        cuts = np.setdiff1d(bytes_V1, self._word_starts(data)).tolist()  # elsewhere the tokenizer cuts them itself
        texts = [data[first:end].decode() for first, end in itertools.pairwise(cuts)]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.fromiter(itertools.chain.from_iterable(encoding.ids for encoding in encodings), dtype=ID)
        ends = np.append(0, np.cumsum(self.num_bytes[ids]))
        tokens_V1 = np.searchsorted(ends, bytes_V1)
        if ends[-1] != len(data) or not np.array_equal(ends[tokens_V1], bytes_V1):
            return None
        found = (ids[first:end].tobytes() for first, end in itertools.pairwise(tokens_V1.tolist()))
        by_word = dict(zip(new, found, strict=True))
        tokens = [self.known.get(word) or by_word[word] for word in words]
        if len(self.known) > NUM_KNOWN:
            self.known.clear()
        self.known.update(item for item in by_word.items() if len(item[0]) <= KNOWN_BYTES)
        return tokens


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
        and all(unicodedata.is_normalized("NFC", token["content"]) for token in added)  # else looked for otherwise
    )
    if not is_byte_level:
        return None
    num_bytes = {token_id: len(text) for text, token_id in model["vocab"].items()}  # one character for each byte
    num_bytes |= {token["id"]: len(token["content"].encode()) for token in added}
    table = np.zeros(max(num_bytes) + 1, dtype=np.int64)
    table[list(num_bytes)] = list(num_bytes.values())
    crosses_words = any(re.search(r"\S ", token["content"]) for token in added)
    backend.normalizer = None
    is_one_search = not backend.encode_special_tokens and len({token["normalized"] for token in added}) == 1
    pattern = any_of(token["content"] for token in added if is_one_search).pattern.encode()
    return _ByteLevel(backend, table, _has_words(steps) and not crosses_words, re.compile(pattern))


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
