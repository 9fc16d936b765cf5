"""Rows that are tokens already: checked, so that their ids mean what they meant to who made
them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import DIGEST_KEY, IDS_KEY, LABELS_KEY, MASK_KEY
from trainer.data.rows import UnusableError
from trainer.data.tokens import Encoded

UNSUPERVISED = -100
MAX_ID = 2**31 - 1


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers with equal tokens under equal ids; 16 hexadecimal digits."""
    return _digest(tokenizer.get_vocab())


def _digest(vocabulary: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]


class TokenRows:
    """Takes over ids and masks of rows that were made with the tokenizer's vocabulary."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        new_tokens: Mapping[str, int],
    ) -> None:
        """`new_tokens`: what the vocabulary of the rows may lack, since no other token's id
        changed.
        """
        self._tokenizer, self._new_tokens = tokenizer, new_tokens

    @cached_property
    def _num_ids(self) -> dict[str, int]:
        """By the digest of a vocabulary that is known; the tokenizer's own is the last."""
        own = self._tokenizer.get_vocab()
        before = {token: number for token, number in own.items() if token not in self._new_tokens}
        return {_digest(vocabulary): max(vocabulary.values()) + 1 for vocabulary in (before, own)}

    def encoded(self, record: Mapping[str, Any]) -> Encoded:
        """Raises `UnusableError`."""
        num_ids = self._num_ids_of(record.get(DIGEST_KEY))
        sample = tokens_in(
            record, [key for key in (MASK_KEY, LABELS_KEY) if record.get(key) is not None]
        )
        wrong = (sample.input_ids < 0) | (sample.input_ids >= num_ids)
        if wrong.any():
            token = sample.input_ids[wrong.argmax()]
            raise UnusableError(
                f"bad tokens: '{IDS_KEY}' has {token}, the tokenizer has 0 to {num_ids - 1}"
            )
        return sample

    def _num_ids_of(self, digest: object) -> int:
        if isinstance(digest, str) and digest in self._num_ids:
            return self._num_ids[digest]
        own = list(self._num_ids)[-1]
        if digest is None:
            fix = f"if this model's tokenizer made them, add a column {DIGEST_KEY} with '{own}'"
            raise UnusableError(
                f"unknown vocabulary: nothing says which tokenizer made the ids; {fix}"
            )
        told = f"the ids were made with another tokenizer ({DIGEST_KEY} {digest!r}, this model's is {own!r})"
        raise UnusableError(f"other vocabulary: {told}; tokenize the texts anew")


def tokens_in(record: Mapping[str, Any], keys: Sequence[str]) -> Encoded:
    """The ids of a row, and what all of `keys` (labels, or masks of 0 and 1) supervise. Raises
    `UnusableError`.
    """
    ids = _integers(record.get(IDS_KEY), IDS_KEY)
    if not len(ids):
        raise UnusableError(f"bad tokens: '{IDS_KEY}' is an empty list")
    if not keys:
        raise UnusableError(
            f"bad tokens: beside '{IDS_KEY}' stands neither '{MASK_KEY}' nor '{LABELS_KEY}'"
        )
    masks = [_mask(record, key, ids) for key in keys]
    if not np.array_equal(masks[0], masks[-1]):
        raise UnusableError(
            f"bad tokens: {' and '.join(map(repr, keys))} supervise different tokens"
        )
    return Encoded(ids, masks[0])


def _mask(record: Mapping[str, Any], key: str, ids: np.ndarray) -> np.ndarray:
    values = _integers(record[key], key)
    if len(values) != len(ids):
        raise UnusableError(
            f"bad tokens: '{key}' has {len(values)} values for {len(ids)} of '{IDS_KEY}'"
        )
    is_label = key == LABELS_KEY
    wrong = (values != UNSUPERVISED) & (values != ids) if is_label else ~np.isin(values, (0, 1))
    if wrong.any():
        place = int(wrong.argmax())
        known = (
            f"the id there ({ids[place]}, not that of the next) and -100" if is_label else "0 and 1"
        )
        raise UnusableError(
            f"bad tokens: '{key}' has {values[place]} at position {place + 1}, known are {known}"
        )
    return values != UNSUPERVISED if is_label else values == 1


def _integers(values: object, key: str) -> np.ndarray:
    """int32. Raises `UnusableError` for all but a list of integers of 32 bits, or of false and
    true.
    """
    try:
        found = np.asarray(values if isinstance(values, list) else None)
    except (ValueError, OverflowError):  # lists of different lengths
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "biu"):
        raise UnusableError(f"bad tokens: '{key}' is not a list of integers")
    if found.size and (found.max() > MAX_ID or found.min() < -MAX_ID):
        raise UnusableError(f"bad tokens: '{key}' has integers of more than 31 bits")
    return found.astype(np.int32)
