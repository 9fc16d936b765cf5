"""Batches of marked texts: the ids that the tokenizer gives for each text alone, and the tokens
inside the marks.
"""

import json
import random
import unicodedata
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data.tokens import MarkedText, TokenFinder

WHITESPACE = [*" \n\t\u2003", "  ", "\n\n"]
WORDS = [
    *["a", "The", "answer", "don't", "12", "..."],
    *["<|end|>", "<think>", "é", "é", "你好", "🙂"],
]
SEEDS = range(20)


def random_text(rng: random.Random) -> str:
    pieces = (rng.choice(WORDS if rng.random() < 0.6 else WHITESPACE) for _ in range(9))
    return "".join(pieces)


def tokenizer_state() -> dict[str, Any]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(0)
    backend.train_from_iterator([random_text(rng) for _ in range(2000)], trainer)
    backend.add_special_tokens(["<|end|>", "<s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


STATE = tokenizer_state()
KINDS: dict[str, dict[str, Any]] = {
    "gpt 2": {},
    "NFC": {"normalizer": {"type": "NFC"}},
    "another normalizer": {"normalizer": {"type": "NFKC"}},
    "spaces cut off the offsets": {
        "post_processor": {**STATE["pre_tokenizer"], "trim_offsets": True}
    },
    "a token that takes in the spaces after it": {
        "added_tokens": [{**token, "rstrip": True} for token in STATE["added_tokens"]]
    },
    "a space put before the text, and spaces taken in": {
        "added_tokens": [{**token, "rstrip": True} for token in STATE["added_tokens"]],
        "pre_tokenizer": {**STATE["pre_tokenizer"], "add_prefix_space": True},
    },
}


def changed(**changes: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with other parts, as in a tokenizer.json."""
    backend = Tokenizer.from_str(json.dumps({**STATE, **changes}))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def find(
    finder: TokenFinder, batch: list[MarkedText]
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    located = finder.find(batch)
    assert all(ids.dtype == np.int32 for ids, *_ in located)
    return [(ids.tolist(), spans) for ids, spans, _ in located]


def expected(
    tokenizer: PreTrainedTokenizerFast, item: MarkedText
) -> tuple[list[int], list[tuple[int, int]]]:
    """One text after the other, by offsets."""
    tokenizer.backend_tokenizer.post_processor = None
    encoding = tokenizer.backend_tokenizer.encode(item.text, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]
    bounds = [np.searchsorted(starts, span).tolist() for span in item.spans]
    return encoding.ids, [(first, end) for first, end in bounds]


def marked_texts(seed: int) -> list[MarkedText]:
    rng = random.Random(seed)
    batch = []
    for _ in range(30):
        text = random_text(rng)
        marks = sorted(
            rng.sample(range(len(text) + 1), k=min(len(text) // 2, rng.randint(0, 3)) * 2)
        )
        batch.append(MarkedText(text, list(zip(marks[::2], marks[1::2], strict=True))))
    return batch


@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_a_batch_are_the_tokenizers(name):
    tokenizer = changed(**KINDS[name])
    finder = TokenFinder(tokenizer)
    for seed in SEEDS:
        batch = marked_texts(seed)
        normalized = [item for item in batch if unicodedata.is_normalized("NFC", item.text)]
        for items in (batch, normalized):
            for item, found in zip(items, find(finder, items), strict=True):
                assert found == expected(tokenizer, item), f"seed {seed}: {item}"
