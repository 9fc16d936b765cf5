"""A sample as the model sees it, its supervised parts told apart."""

import itertools
import re
import sys
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Texts come from data anyone may have written: what drives a terminal or turns the direction
of reading is spelled.
"""


def visible(text: str) -> str:
    return _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text)


def marked_parts(
    input_ids: np.ndarray, loss_mask: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    """The decoded sample in parts, and whether each is supervised."""
    bounds = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1).tolist(), len(input_ids)]
    for start, end in itertools.pairwise(bounds):
        if start < end:
            text = tokenizer.decode(
                input_ids[start:end].tolist(), clean_up_tokenization_spaces=False
            )
            yield visible(str(text)), bool(loss_mask[start])


def preview(
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    *,
    color: bool | None = None,
) -> str:
    """The decoded sample, its supervised parts in green or in [[…]]; `color` None means green
    on a terminal.
    """
    opening, closing = (
        ("\x1b[32m", "\x1b[0m")
        if (sys.stdout.isatty() if color is None else color)
        else ("[[", "]]")
    )
    parts = marked_parts(input_ids, loss_mask, tokenizer)
    return "".join(
        f"{opening}{text}{closing}" if is_supervised else text for text, is_supervised in parts
    )
