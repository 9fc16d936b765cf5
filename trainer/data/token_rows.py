"""Rows that are tokens already: checked, so that their ids mean what they meant to who made them."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import DIGEST_KEY, IDS_KEY, LABELS_KEY, MASK_KEY
from trainer.data.rows import UnusableError
from trainer.data.tokens import Encoded

UNSUPERVISED = -100


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers with equal tokens under equal ids; 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


class TokenRows:
    """Takes over ids and masks of rows that were made with the tokenizer's vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, declared_digest: str | None) -> None:
        """`declared_digest`: of the vocabulary that made rows which do not name it themselves."""
        self._tokenizer, self._declared_digest = tokenizer, declared_digest

    @cached_property
    def _digest(self) -> str:
        return vocabulary_digest(self._tokenizer)

    @cached_property
    def _num_ids(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    def encoded(self, record: Mapping[str, Any]) -> Encoded:
        """Raises `UnusableError`."""
        self._require_vocabulary(record.get(DIGEST_KEY, self._declared_digest))
        ids = _integers(record[IDS_KEY], IDS_KEY)
        if not len(ids):
            raise UnusableError(f"bad tokens: '{IDS_KEY}' is an empty list")
        if (low := int(ids.min())) < 0 or int(ids.max()) >= self._num_ids:
            wrong = low if low < 0 else int(ids.max())
            raise UnusableError(f"bad tokens: '{IDS_KEY}' has {wrong}, the tokenizer has 0 to {self._num_ids - 1}")
        masks = [self._mask(record, key, ids) for key in (MASK_KEY, LABELS_KEY) if record.get(key) is not None]
        if not masks:
            raise UnusableError(f"bad tokens: beside '{IDS_KEY}' stands neither '{MASK_KEY}' nor '{LABELS_KEY}'")
        if not np.array_equal(masks[0], masks[-1]):
            raise UnusableError(f"bad tokens: '{MASK_KEY}' and '{LABELS_KEY}' supervise different tokens")
        return Encoded(ids.astype(np.int32), masks[0])

    def _require_vocabulary(self, digest: object) -> None:
        if digest == self._digest:
            return
        if digest is None:
            fix = f"if they were made with this model's tokenizer, set data.{DIGEST_KEY}={self._digest}"
            raise UnusableError(f"unknown vocabulary: nothing says which tokenizer made the ids; {fix}")
        told = f"the ids were made with another tokenizer ({DIGEST_KEY} {digest!r}, this model's is {self._digest!r})"
        raise UnusableError(f"other vocabulary: {told}; tokenize the texts anew")

    def _mask(self, record: Mapping[str, Any], key: str, ids: np.ndarray) -> np.ndarray:
        values = _integers(record[key], key)
        if len(values) != len(ids):
            raise UnusableError(f"bad tokens: '{key}' has {len(values)} values for {len(ids)} of '{IDS_KEY}'")
        wrong = ~np.isin(values, (0, 1)) if key == MASK_KEY else (values != UNSUPERVISED) & (values != ids)
        if wrong.any():
            place = int(wrong.argmax())
            known = "0 and 1" if key == MASK_KEY else f"the id there ({ids[place]}, not that of the next) and -100"
            raise UnusableError(f"bad tokens: '{key}' has {values[place]} at position {place + 1}, known are {known}")
        return values == 1 if key == MASK_KEY else values != UNSUPERVISED


def _integers(values: object, key: str) -> np.ndarray:
    """int64. Raises `UnusableError` for all but a list of integers, or of false and true."""
    try:
        found = np.asarray(values if isinstance(values, list) else None)
    except (ValueError, OverflowError):  # lists of different lengths
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "biu"):
        raise UnusableError(f"bad tokens: '{key}' is not a list of integers")
    return found.astype(np.int64)
